// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s -o %t 2>&1 | FileCheck %s --check-prefix=WARN
// RUN: cat %t | FileCheck %s

// What looks like a block-scaled matmul and cannot be served stays as it is, with a warning that
// names the reason; what does not look like one stays without a word.

#mk = affine_map<(m, n, k) -> (m, k)>
#nk = affine_map<(m, n, k) -> (n, k)>
#mn = affine_map<(m, n, k) -> (m, n)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#xs16 = affine_map<(m, n, k) -> (m, k floordiv 16)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#ws48 = affine_map<(m, n, k) -> (n floordiv 48, k floordiv 32)>

// CHECK-LABEL: func.func @other_scale_type
// CHECK: ins({{.*}} : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E4M3FN>,
func.func @other_scale_type(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E4M3FN>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {
  %y = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws, #mn]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E4M3FN>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// CHECK-LABEL: func.func @fnuz
// CHECK: linalg.scaled_contract {{.*}}f8E4M3FNUZ
func.func @fnuz(%x: tensor<4x64xf8E4M3FNUZ>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FNUZ>, %ws: tensor<1x2xf8E8M0FNU>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {
  %y = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws, #mn]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FNUZ>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FNUZ>, tensor<1x2xf8E8M0FNU>)
    outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// What is canonical but for its element types is left alone as well.
// CHECK-LABEL: func.func @fnuz_into_zeros
// CHECK: linalg.scaled_contract {{.*}}f8E5M2FNUZ
func.func @fnuz_into_zeros(%x: tensor<4x64xf8E5M2FNUZ>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws, #mn]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E5M2FNUZ>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// CHECK-LABEL: func.func @blocks_of_16
// CHECK: linalg.scaled_contract {{.*}}tensor<4x4xf8E8M0FNU>
func.func @blocks_of_16(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x4xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {
  %y = linalg.scaled_contract indexing_maps = [#mk, #xs16, #nk, #ws, #mn]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x4xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// CHECK-LABEL: func.func @blocks_of_48_rows
// CHECK: linalg.scaled_contract {{.*}}tensor<2x2xf8E8M0FNU>
func.func @blocks_of_48_rows(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<96x64xf8E4M3FN>, %ws: tensor<2x2xf8E8M0FNU>, %i: tensor<4x96xf32>) -> tensor<4x96xf32> {
  %y = linalg.scaled_contract indexing_maps = [#mk, #xs, #nk, #ws48, #mn]
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<96x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>)
    outs(%i : tensor<4x96xf32>) -> tensor<4x96xf32>
  return %y : tensor<4x96xf32>
}

// CHECK-LABEL: func.func @ordinary
// CHECK: linalg.matmul
func.func @ordinary(%x: tensor<4x64xf32>, %w: tensor<64x32xf32>, %i: tensor<4x32xf32>) -> tensor<4x32xf32> {
  %y = linalg.matmul ins(%x, %w : tensor<4x64xf32>, tensor<64x32xf32>) outs(%i : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// WARN: warning: looks like a block-scaled matmul and is left alone: expected scales of type f8E8M0FNU but got f8E4M3FN
// WARN: warning: looks like a block-scaled matmul and is left alone: expected operands of f8E4M3FN, f8E5M2, f4E2M1FN but got f8E4M3FNUZ (FNUZ types belong to older AMD chips (gfx94x); MXFP8 values are f8E4M3FN: take 1 off each scale byte and bitcast codes other than 0x7F, 0x80 and 0xFF)
// WARN: warning: looks like a block-scaled matmul and is left alone: expected operands of f8E4M3FN, f8E5M2, f4E2M1FN but got f8E5M2FNUZ (FNUZ types belong to older AMD chips (gfx94x); MXFP8 values are f8E5M2: take 1 off each scale byte and bitcast codes other than 0x80 and those above 0x7B, 0xFB)
// WARN: warning: looks like a block-scaled matmul and is left alone: expected 32 elements of K to share a scale but got 16
// WARN: warning: looks like a block-scaled matmul and is left alone: expected 1x32 or 32x32 scales (or multiples) on the right operand but got 48x32
// WARN-NOT: warning
