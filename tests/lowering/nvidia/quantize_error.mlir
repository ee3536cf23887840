// RUN: not block32 compile %s --target=sm_90a -o %t.vmfb 2>&1 | FileCheck %s

// Only the form for few rows quantises what it multiplies.

#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<120> : tensor<2x16xi8>

// CHECK: error: {{.*}} asks for a kernel that sm_90a cannot run: quantize 'fused' is for the stream form; expected 'separate'
func.func @many(%x: tensor<40x512xf32>, %w: tensor<64x512xf8E4M3FN>) -> tensor<40x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<40x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws},
       block32.kernel = {target = "sm_90a", tiers = [{form = "tiled", tile = [64, 64, 64], warps = 4, stages = 4, quantize = "fused"}]}}
      ins(%x, %w : tensor<40x512xf32>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<40x64xf32>) -> tensor<40x64xf32>
  return %r : tensor<40x64xf32>
}
