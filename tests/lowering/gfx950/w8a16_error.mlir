// RUN: not block32 compile %s --target=gfx950 -o %t 2>&1 | FileCheck %s

// An activation without scales has one form of kernel.

util.global private @scales = dense<120> : tensor<2x16xi8>
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK: w8a16_error.mlir:[[LINE:[0-9]+]]:8: error: {{.*}} asks for a kernel that gfx950 cannot run: form is 'tiled'; expected 'packed' for an x without scales
func.func @main(%x: tensor<8x512xbf16>, %w: tensor<64x512xf8E4M3FN>) -> tensor<8x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y] {block32.rhs = {block = [32, 32], scale = @scales},
      block32.kernel = {target = "gfx950", tiers = [{form = "tiled", tile = [64, 64, 256], warps = 4, stages = 2}]}}
    ins(%x, %w : tensor<8x512xbf16>, tensor<64x512xf8E4M3FN>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  return %r : tensor<8x64xf32>
}
