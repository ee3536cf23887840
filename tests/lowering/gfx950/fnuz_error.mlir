// RUN: not block32 compile %s --target=gfx950 -o %t 2>&1 | FileCheck %s

// FNUZ types are those of the chip before: a kernel that is asked for on them is refused by name.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK: fnuz_error.mlir:[[LINE:[0-9]+]]:8: error: 'linalg.scaled_contract' op cannot be raised: expected operands of f8E4M3FN, f8E5M2, f4E2M1FN but got f8E4M3FNUZ (FNUZ types belong to older AMD chips (gfx94x); MXFP8 values are f8E4M3FN: take 1 off each scale byte and bitcast codes other than 0x7F, 0x80 and 0xFF)
func.func @main(%x: tensor<4x512xf8E4M3FNUZ>, %xs: tensor<4x16xf8E8M0FNU>,
    %w: tensor<64x512xf8E4M3FNUZ>, %ws: tensor<2x16xf8E8M0FNU>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "packed", tile = [8, 16, 256], k_pack = 2}]}}
    ins(%x, %xs, %w, %ws : tensor<4x512xf8E4M3FNUZ>, tensor<4x16xf8E8M0FNU>, tensor<64x512xf8E4M3FNUZ>, tensor<2x16xf8E8M0FNU>)
    outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}
