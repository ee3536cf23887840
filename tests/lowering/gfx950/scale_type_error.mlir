// RUN: not block32 compile %s --target=gfx950 -o %t 2>&1 | FileCheck %s

// Scales of another type are left to IREE, which cannot compile them: the warning says why, and is
// printed before IREE's own error.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK: scale_type_error.mlir:[[LINE:[0-9]+]]:8: warning: looks like a block-scaled matmul and is left alone: expected scales of type f8E8M0FNU but got f32
// CHECK: scale_type_error.mlir:[[LINE]]:8: error: 
func.func @main(%x: tensor<4x512xf8E4M3FN>, %xs: tensor<4x16xf32>,
    %w: tensor<64x512xf8E4M3FN>, %ws: tensor<2x16xf32>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<4x512xf8E4M3FN>, tensor<4x16xf32>, tensor<64x512xf8E4M3FN>, tensor<2x16xf32>)
    outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}
