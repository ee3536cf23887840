// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s | FileCheck %s
// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s | iree-opt | FileCheck %s --check-prefix=PARSES

// Every layout of linalg.scaled_contract becomes (m,k) x (n,k) with 1x32 or 32x32 scales.

#mk = affine_map<(m, n, k) -> (m, k)>
#km = affine_map<(m, n, k) -> (k, m)>
#nk = affine_map<(m, n, k) -> (n, k)>
#kn = affine_map<(m, n, k) -> (k, n)>
#mn = affine_map<(m, n, k) -> (m, n)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#xs_t = affine_map<(m, n, k) -> (k floordiv 32, m)>
#ws1 = affine_map<(m, n, k) -> (n, k floordiv 32)>
#ws32_t = affine_map<(m, n, k) -> (k floordiv 32, n floordiv 32)>
#ws128 = affine_map<(m, n, k) -> (n floordiv 128, k floordiv 128)>

// CHECK-DAG: #[[X:.+]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG: #[[XS:.+]] = affine_map<(d0, d1, d2) -> (d0, d2 floordiv 32)>
// CHECK-DAG: #[[W:.+]] = affine_map<(d0, d1, d2) -> (d1, d2)>
// CHECK-DAG: #[[WS32:.+]] = affine_map<(d0, d1, d2) -> (d1 floordiv 32, d2 floordiv 32)>
// CHECK-DAG: #[[WS1:.+]] = affine_map<(d0, d1, d2) -> (d1, d2 floordiv 32)>
// CHECK-DAG: #[[Y:.+]] = affine_map<(d0, d1, d2) -> (d0, d1)>

// PARSES: func.func @both_transposed

// CHECK-LABEL: func.func @both_transposed
// CHECK-SAME: %[[A:.+]]: tensor<72x4xf8E4M3FN>, %[[AS:.+]]: tensor<3x4xf8E8M0FNU>, %[[B:.+]]: tensor<72x40xf8E4M3FN>, %[[BS:.+]]: tensor<3x2xf8E8M0FNU>
// CHECK-DAG: %[[AST:.+]] = linalg.transpose ins(%[[AS]] : tensor<3x4xf8E8M0FNU>)
// CHECK-DAG: %[[BST:.+]] = linalg.transpose ins(%[[BS]] : tensor<3x2xf8E8M0FNU>)
// CHECK-DAG: %[[AT:.+]] = linalg.transpose ins(%[[A]] : tensor<72x4xf8E4M3FN>)
// CHECK-DAG: %[[BT:.+]] = linalg.transpose ins(%[[B]] : tensor<72x40xf8E4M3FN>)
// CHECK: linalg.scaled_contract indexing_maps = [#[[X]], #[[XS]], #[[W]], #[[WS32]], #[[Y]]]
// CHECK-SAME: ins(%[[AT]], %[[AST]], %[[BT]], %[[BST]] : tensor<4x72xf8E4M3FN>, tensor<4x3xf8E8M0FNU>, tensor<40x72xf8E4M3FN>, tensor<2x3xf8E8M0FNU>)
func.func @both_transposed(%x: tensor<72x4xf8E4M3FN>, %xs: tensor<3x4xf8E8M0FNU>,
    %w: tensor<72x40xf8E4M3FN>, %ws: tensor<3x2xf8E8M0FNU>) -> tensor<4x40xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x40xf32>
  %y = linalg.scaled_contract indexing_maps = [#km, #xs_t, #kn, #ws32_t, #mn]
    ins(%x, %xs, %w, %ws : tensor<72x4xf8E4M3FN>, tensor<3x4xf8E8M0FNU>, tensor<72x40xf8E4M3FN>, tensor<3x2xf8E8M0FNU>)
    outs(%zero : tensor<4x40xf32>) -> tensor<4x40xf32>
  return %y : tensor<4x40xf32>
}

// Coarser scales are repeated, which is exact.
// CHECK-LABEL: func.func @scales_of_128x128
// CHECK: %[[FINE:.+]] = linalg.generic {{.*}} outs(%{{.+}} : tensor<10x5xf8E8M0FNU>)
// CHECK: tensor.extract %arg3
// CHECK: linalg.scaled_contract indexing_maps = [#[[X]], #[[XS]], #[[W]], #[[WS32]], #[[Y]]]
// CHECK-SAME: tensor<10x5xf8E8M0FNU>
func.func @scales_of_128x128(%x: tensor<?x130xf8E4M3FN>, %xs: tensor<?x5xf8E8M0FNU>,
    %w: tensor<300x130xf8E4M3FN>, %ws: tensor<3x2xf8E8M0FNU>, %y: tensor<?x300xbf16>) -> tensor<?x300xbf16> {
  %cst = arith.constant 0.0 : bf16
  %zero = linalg.fill ins(%cst : bf16) outs(%y : tensor<?x300xbf16>) -> tensor<?x300xbf16>
  %r = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws128, #mn]
    ins(%x, %xs, %w, %ws : tensor<?x130xf8E4M3FN>, tensor<?x5xf8E8M0FNU>, tensor<300x130xf8E4M3FN>, tensor<3x2xf8E8M0FNU>)
    outs(%zero : tensor<?x300xbf16>) -> tensor<?x300xbf16>
  return %r : tensor<?x300xbf16>
}

// An init that is no zero is added in f32 and rounded once.
// CHECK-LABEL: func.func @accumulates
// CHECK: %[[PRODUCT:.+]] = linalg.scaled_contract indexing_maps = [#[[X]], #[[XS]], #[[W]], #[[WS1]], #[[Y]]]
// CHECK-SAME: -> tensor<2x16xf32>
// CHECK: linalg.generic {{.*}} ins(%[[PRODUCT]] : tensor<2x16xf32>) outs(%arg4 : tensor<2x16xf16>)
// CHECK: arith.extf {{.*}} : f16 to f32
// CHECK: arith.addf {{.*}} : f32
// CHECK: arith.truncf {{.*}} : f32 to f16
func.func @accumulates(%x: tensor<2x32xf8E5M2>, %xs: tensor<2x1xf8E8M0FNU>,
    %w: tensor<16x32xf8E4M3FN>, %ws: tensor<16x1xf8E8M0FNU>, %init: tensor<2x16xf16>) -> tensor<2x16xf16> {
  %r = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws1, #mn]
    ins(%x, %xs, %w, %ws : tensor<2x32xf8E5M2>, tensor<2x1xf8E8M0FNU>, tensor<16x32xf8E4M3FN>, tensor<16x1xf8E8M0FNU>)
    outs(%init : tensor<2x16xf16>) -> tensor<2x16xf16>
  return %r : tensor<2x16xf16>
}
