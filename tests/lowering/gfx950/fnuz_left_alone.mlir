// RUN: not block32 compile %s --target=gfx950 -o %t 2>&1 | FileCheck %s

// A FNUZ matmul for which nobody asked a kernel of ours is left alone, with a warning that says how
// to come to one; whether the rest of IREE can compile it is another matter.

// CHECK: fnuz_left_alone.mlir:[[LINE:[0-9]+]]:8: warning: looks like a block-scaled matmul and is left alone: {{.*}} take 1 off each scale byte and bitcast codes other than 0x7F, 0x80 and 0xFF
// CHECK: fnuz_left_alone.mlir:[[LINE]]:8: error: failed to pack reduction dimensions

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

func.func @main(%x: tensor<4x512xf8E4M3FNUZ>, %xs: tensor<4x16xf8E8M0FNU>,
    %w: tensor<64x512xf8E4M3FNUZ>, %ws: tensor<2x16xf8E8M0FNU>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<4x512xf8E4M3FNUZ>, tensor<4x16xf8E8M0FNU>, tensor<64x512xf8E4M3FNUZ>, tensor<2x16xf8E8M0FNU>)
    outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}
