// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s | FileCheck %s

// A weight for each batch: a grouped matmul, whose groups are the batches. Their rows follow each
// other, so that the groups begin at multiples of M.

#bmk = affine_map<(b, m, n, k) -> (b, m, k)>
#mbk = affine_map<(b, m, n, k) -> (m, b, k)>
#bnk = affine_map<(b, m, n, k) -> (b, n, k)>
#bkn = affine_map<(b, m, n, k) -> (b, k, n)>
#bmn = affine_map<(b, m, n, k) -> (b, m, n)>
#xs = affine_map<(b, m, n, k) -> (b, m, k floordiv 32)>
#ws = affine_map<(b, m, n, k) -> (b, n floordiv 32, k floordiv 32)>
#ws128 = affine_map<(b, m, n, k) -> (b, n floordiv 128, k floordiv 128)>

// CHECK: util.func private @[[STATIC:block32_grouped_matmul_12x40x72_e4m3_e4m3_32x32_f32_3experts_3groups]]
// CHECK-LABEL: func.func @static_rows
// CHECK-SAME: %[[X:.+]]: tensor<3x4x72xf8E4M3FN>, %{{.+}}: tensor<3x4x3xf8E8M0FNU>, %[[W:.+]]: tensor<3x40x72xf8E4M3FN>, %[[WS:.+]]: tensor<3x2x3xf8E8M0FNU>
// CHECK: %[[ROWS:.+]] = tensor.collapse_shape %[[X]] {{\[}}[0, 1], [2]] : tensor<3x4x72xf8E4M3FN> into tensor<12x72xf8E4M3FN>
// CHECK: %[[OFFSETS:.+]] = arith.constant dense<[0, 4, 8, 12]> : tensor<4xi32>
// CHECK: %[[IDS:.+]] = arith.constant dense<[0, 1, 2]> : tensor<3xi32>
// CHECK: %[[ZERO:.+]] = linalg.fill
// CHECK: %[[Y:.+]] = util.call @[[STATIC]](%[[ROWS]], %[[W]], %{{.+}}, %[[WS]], %[[OFFSETS]], %[[IDS]], %[[ZERO]])
// CHECK: tensor.expand_shape %[[Y]] {{\[}}[0, 1], [2]] output_shape [3, 4, 40]
func.func @static_rows(%x: tensor<3x4x72xf8E4M3FN>, %xs: tensor<3x4x3xf8E8M0FNU>,
    %w: tensor<3x40x72xf8E4M3FN>, %ws: tensor<3x2x3xf8E8M0FNU>) -> tensor<3x4x40xf32> {
  %zero = arith.constant dense<0.0> : tensor<3x4x40xf32>
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws, #bmn]
    ins(%x, %xs, %w, %ws : tensor<3x4x72xf8E4M3FN>, tensor<3x4x3xf8E8M0FNU>, tensor<3x40x72xf8E4M3FN>, tensor<3x2x3xf8E8M0FNU>)
    outs(%zero : tensor<3x4x40xf32>) -> tensor<3x4x40xf32>
  return %y : tensor<3x4x40xf32>
}

// Offsets are computed; the weight is transposed to [batches, N, K], x to [batches, M, K], and
// coarser scales are repeated within each weight.
// CHECK-LABEL: func.func @dynamic_rows
// CHECK-SAME: %[[X:.+]]: tensor<?x3x72xf8E4M3FN>, %{{.+}}: tensor<3x?x3xf8E8M0FNU>, %[[W:.+]]: tensor<3x72x200xf8E4M3FN>
// CHECK: linalg.transpose ins(%[[X]] : tensor<?x3x72xf8E4M3FN>) outs({{.*}}) permutation = [1, 0, 2]
// CHECK: linalg.transpose ins(%[[W]] : tensor<3x72x200xf8E4M3FN>) outs({{.*}}) permutation = [0, 2, 1]
// CHECK: tensor<3x7x3xf8E8M0FNU>
// CHECK: %[[BATCH:.+]] = arith.divui %{{.+}}, %c3{{.*}} : index
// CHECK: linalg.generic {{.*}} outs(%{{.+}} : tensor<4xi32>)
// CHECK: %[[B:.+]] = linalg.index 0
// CHECK: arith.muli %[[B]], %[[BATCH]] : index
// CHECK: util.call @block32_grouped_matmul_Mx200x72_e4m3_e4m3_32x32_f32_3experts_3groups
func.func @dynamic_rows(%x: tensor<?x3x72xf8E4M3FN>, %xs: tensor<3x?x3xf8E8M0FNU>,
    %w: tensor<3x72x200xf8E4M3FN>, %ws: tensor<3x2x1xf8E8M0FNU>, %e: tensor<3x?x200xf32>) -> tensor<3x?x200xf32> {
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : tensor<3x?x200xf32>) -> tensor<3x?x200xf32>
  %y = linalg.scaled_contract indexing_maps = [#mbk, #xs, #bkn, #ws128, #bmn]
    ins(%x, %xs, %w, %ws : tensor<?x3x72xf8E4M3FN>, tensor<3x?x3xf8E8M0FNU>, tensor<3x72x200xf8E4M3FN>, tensor<3x2x1xf8E8M0FNU>)
    outs(%zero : tensor<3x?x200xf32>) -> tensor<3x?x200xf32>
  return %y : tensor<3x?x200xf32>
}

// One batch is no group.
// CHECK-LABEL: func.func @one_batch
// CHECK-NOT: util.call
// CHECK: linalg.scaled_contract
// CHECK-SAME: tensor<4x72xf8E4M3FN>, tensor<4x3xf8E8M0FNU>, tensor<40x72xf8E4M3FN>, tensor<2x3xf8E8M0FNU>
func.func @one_batch(%x: tensor<1x4x72xf8E4M3FN>, %xs: tensor<1x4x3xf8E8M0FNU>,
    %w: tensor<1x40x72xf8E4M3FN>, %ws: tensor<1x2x3xf8E8M0FNU>) -> tensor<1x4x40xf32> {
  %zero = arith.constant dense<0.0> : tensor<1x4x40xf32>
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws, #bmn]
    ins(%x, %xs, %w, %ws : tensor<1x4x72xf8E4M3FN>, tensor<1x4x3xf8E8M0FNU>, tensor<1x40x72xf8E4M3FN>, tensor<1x2x3xf8E8M0FNU>)
    outs(%zero : tensor<1x4x40xf32>) -> tensor<1x4x40xf32>
  return %y : tensor<1x4x40xf32>
}
