// RUN: not block32 compile %s --target=gfx950 -o %t 2>&1 | FileCheck %s

// A kernel that is asked for and does not fit the machine is refused with its need and the limit.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK: lds_error.mlir:[[LINE:[0-9]+]]:8: error: 'linalg.scaled_contract' op asks for a kernel that gfx950 cannot run: 524288 bytes of LDS; expected at most 163840
func.func @main(%x: tensor<4x512xf8E4M3FN>, %xs: tensor<4x16xf8E8M0FNU>,
    %w: tensor<64x512xf8E4M3FN>, %ws: tensor<2x16xf8E8M0FNU>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "tiled", tile = [256, 64, 1024], warps = 4, stages = 2}]}}
    ins(%x, %xs, %w, %ws : tensor<4x512xf8E4M3FN>, tensor<4x16xf8E8M0FNU>, tensor<64x512xf8E4M3FN>, tensor<2x16xf8E8M0FNU>)
    outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}
