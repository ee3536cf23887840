// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s -o %t 2>&1 | FileCheck %s --check-prefix=WARN
// RUN: cat %t | FileCheck %s

// Batches that cannot be the groups of a grouped matmul stay as they are, and the warning says why.

#bmk = affine_map<(b, m, n, k) -> (b, m, k)>
#bnk = affine_map<(b, m, n, k) -> (b, n, k)>
#bmn = affine_map<(b, m, n, k) -> (b, m, n)>
#mbn = affine_map<(b, m, n, k) -> (m, b, n)>
#xs = affine_map<(b, m, n, k) -> (b, m, k floordiv 32)>
#ws = affine_map<(b, m, n, k) -> (b, n floordiv 32, k floordiv 32)>
#ws_shared = affine_map<(b, m, n, k) -> (n floordiv 32, k floordiv 32)>
#ws_pairs = affine_map<(b, m, n, k) -> (b floordiv 2, n floordiv 32, k floordiv 32)>

// CHECK-LABEL: func.func @any_number_of_weights
// CHECK: linalg.scaled_contract {{.*}}tensor<?x40x64xf8E4M3FN>
// WARN: warning: looks like a block-scaled matmul and is left alone: expected a static number of weights
func.func @any_number_of_weights(%x: tensor<?x4x64xf8E4M3FN>, %xs: tensor<?x4x2xf8E8M0FNU>,
    %w: tensor<?x40x64xf8E4M3FN>, %ws: tensor<?x2x2xf8E8M0FNU>, %i: tensor<?x4x40xf32>) -> tensor<?x4x40xf32> {
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws, #bmn]
    ins(%x, %xs, %w, %ws : tensor<?x4x64xf8E4M3FN>, tensor<?x4x2xf8E8M0FNU>, tensor<?x40x64xf8E4M3FN>, tensor<?x2x2xf8E8M0FNU>)
    outs(%i : tensor<?x4x40xf32>) -> tensor<?x4x40xf32>
  return %y : tensor<?x4x40xf32>
}

// CHECK-LABEL: func.func @no_weights
// CHECK: linalg.scaled_contract {{.*}}tensor<0x40x64xf8E4M3FN>
// WARN: warning: {{.*}}: expected a weight for at least one batch but got 0
func.func @no_weights(%x: tensor<0x4x64xf8E4M3FN>, %xs: tensor<0x4x2xf8E8M0FNU>,
    %w: tensor<0x40x64xf8E4M3FN>, %ws: tensor<0x2x2xf8E8M0FNU>, %i: tensor<0x4x40xf32>) -> tensor<0x4x40xf32> {
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws, #bmn]
    ins(%x, %xs, %w, %ws : tensor<0x4x64xf8E4M3FN>, tensor<0x4x2xf8E8M0FNU>, tensor<0x40x64xf8E4M3FN>, tensor<0x2x2xf8E8M0FNU>)
    outs(%i : tensor<0x4x40xf32>) -> tensor<0x4x40xf32>
  return %y : tensor<0x4x40xf32>
}

// CHECK-LABEL: func.func @scales_of_all_weights
// CHECK: linalg.scaled_contract {{.*}}tensor<3x40x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>
// WARN: warning: {{.*}}: expected scales for each batch, got (d0, d1, d2, d3) -> (d2 floordiv 32, d3 floordiv 32)
func.func @scales_of_all_weights(%x: tensor<3x4x64xf8E4M3FN>, %xs: tensor<3x4x2xf8E8M0FNU>,
    %w: tensor<3x40x64xf8E4M3FN>, %ws: tensor<2x2xf8E8M0FNU>, %i: tensor<3x4x40xf32>) -> tensor<3x4x40xf32> {
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws_shared, #bmn]
    ins(%x, %xs, %w, %ws : tensor<3x4x64xf8E4M3FN>, tensor<3x4x2xf8E8M0FNU>, tensor<3x40x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>)
    outs(%i : tensor<3x4x40xf32>) -> tensor<3x4x40xf32>
  return %y : tensor<3x4x40xf32>
}

// CHECK-LABEL: func.func @scales_of_pairs_of_weights
// CHECK: linalg.scaled_contract {{.*}}tensor<4x40x64xf8E4M3FN>, tensor<2x2x2xf8E8M0FNU>
// WARN: warning: {{.*}}: unsupported scale map (d0, d1, d2, d3) -> (d0 floordiv 2,
func.func @scales_of_pairs_of_weights(%x: tensor<4x4x64xf8E4M3FN>, %xs: tensor<4x4x2xf8E8M0FNU>,
    %w: tensor<4x40x64xf8E4M3FN>, %ws: tensor<2x2x2xf8E8M0FNU>, %i: tensor<4x4x40xf32>) -> tensor<4x4x40xf32> {
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws_pairs, #bmn]
    ins(%x, %xs, %w, %ws : tensor<4x4x64xf8E4M3FN>, tensor<4x4x2xf8E8M0FNU>, tensor<4x40x64xf8E4M3FN>, tensor<2x2x2xf8E8M0FNU>)
    outs(%i : tensor<4x4x40xf32>) -> tensor<4x4x40xf32>
  return %y : tensor<4x4x40xf32>
}

// CHECK-LABEL: func.func @rows_before_batches
// CHECK: linalg.scaled_contract {{.*}} -> tensor<4x3x40xf32>
// WARN: warning: {{.*}}: expected loops (m, n, k), with n and k whole or split into blocks of 32, and batches before m
func.func @rows_before_batches(%x: tensor<3x4x64xf8E4M3FN>, %xs: tensor<3x4x2xf8E8M0FNU>,
    %w: tensor<3x40x64xf8E4M3FN>, %ws: tensor<3x2x2xf8E8M0FNU>, %i: tensor<4x3x40xf32>) -> tensor<4x3x40xf32> {
  %y = linalg.scaled_contract indexing_maps = [#bmk, #xs, #bnk, #ws, #mbn]
    ins(%x, %xs, %w, %ws : tensor<3x4x64xf8E4M3FN>, tensor<3x4x2xf8E8M0FNU>, tensor<3x40x64xf8E4M3FN>, tensor<3x2x2xf8E8M0FNU>)
    outs(%i : tensor<4x3x40xf32>) -> tensor<4x3x40xf32>
  return %y : tensor<4x3x40xf32>
}

// WARN-NOT: warning
