// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s | FileCheck %s

// The generic over (M, N, K/32, 32) with two arith.scaling_extf, as IREE's own tests spell it.

#x = affine_map<(m, n, b, k) -> (m, b, k)>
#xs = affine_map<(m, n, b, k) -> (m, b)>
#w = affine_map<(m, n, b, k) -> (n, b, k)>
#ws = affine_map<(m, n, b, k) -> (n, b)>
#y = affine_map<(m, n, b, k) -> (m, n)>
#split_x = affine_map<(m, no, ni, b, k) -> (m, b, k)>
#split_xs = affine_map<(m, no, ni, b, k) -> (m, b)>
#split_w = affine_map<(m, no, ni, b, k) -> (no, ni, b, k)>
#split_ws = affine_map<(m, no, ni, b, k) -> (no, b)>
#split_y = affine_map<(m, no, ni, b, k) -> (m, no, ni)>

// CHECK-DAG: #[[WS1:.+]] = affine_map<(d0, d1, d2) -> (d1, d2 floordiv 32)>
// CHECK-DAG: #[[WS32:.+]] = affine_map<(d0, d1, d2) -> (d1 floordiv 32, d2 floordiv 32)>

// The weight comes first among the operands, the factors and the addends are swapped.
// CHECK-LABEL: func.func @swapped
// CHECK-DAG: %[[W:.+]] = tensor.collapse_shape %arg0 {{\[\[0\], \[1, 2\]\]}} : tensor<48x2x32xf8E4M3FN> into tensor<48x64xf8E4M3FN>
// CHECK-DAG: %[[X:.+]] = tensor.collapse_shape %arg2 {{\[\[0\], \[1, 2\]\]}} : tensor<?x2x32xf8E5M2> into tensor<?x64xf8E5M2>
// CHECK: linalg.scaled_contract indexing_maps = [{{#[a-z0-9]+, #[a-z0-9]+, #[a-z0-9]+}}, #[[WS1]],
// CHECK-SAME: ins(%[[X]], %arg3, %[[W]], %arg1 :
func.func @swapped(%w: tensor<48x2x32xf8E4M3FN>, %ws: tensor<48x2xf8E8M0FNU>,
    %x: tensor<?x2x32xf8E5M2>, %xs: tensor<?x2xf8E8M0FNU>, %out: tensor<?x48xf32>) -> tensor<?x48xf32> {
  %cst = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%cst : f32) outs(%out : tensor<?x48xf32>) -> tensor<?x48xf32>
  %y = linalg.generic {indexing_maps = [#w, #x, #ws, #xs, #y],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}
      ins(%w, %x, %ws, %xs : tensor<48x2x32xf8E4M3FN>, tensor<?x2x32xf8E5M2>, tensor<48x2xf8E8M0FNU>, tensor<?x2xf8E8M0FNU>)
      outs(%zero : tensor<?x48xf32>) {
  ^bb0(%b: f8E4M3FN, %a: f8E5M2, %bs: f8E8M0FNU, %as: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %a, %as : f8E5M2, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %2, %acc : f32
    linalg.yield %3 : f32
  } -> tensor<?x48xf32>
  return %y : tensor<?x48xf32>
}

// N split into (N/32, 32) says 32x32 blocks; the result gets its shape back.
// CHECK-LABEL: func.func @split_n
// CHECK: tensor.collapse_shape %arg2 {{\[\[0, 1\], \[2, 3\]\]}} : tensor<3x32x2x32xf8E4M3FN> into tensor<96x64xf8E4M3FN>
// CHECK: %[[Y:.+]] = linalg.scaled_contract indexing_maps = [{{#[a-z0-9]+, #[a-z0-9]+, #[a-z0-9]+}}, #[[WS32]],
// CHECK: tensor.expand_shape %[[Y]] {{\[\[0\], \[1, 2\]\]}} output_shape [4, 3, 32] : tensor<4x96xf32> into tensor<4x3x32xf32>
func.func @split_n(%x: tensor<4x2x32xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<3x32x2x32xf8E4M3FN>, %ws: tensor<3x2xf8E8M0FNU>) -> tensor<4x3x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x3x32xf32>
  %y = linalg.generic {indexing_maps = [#split_x, #split_w, #split_xs, #split_ws, #split_y],
      iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction"]}
      ins(%x, %w, %xs, %ws : tensor<4x2x32xf8E4M3FN>, tensor<3x32x2x32xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<3x2xf8E8M0FNU>)
      outs(%zero : tensor<4x3x32xf32>) {
  ^bb0(%a: f8E4M3FN, %b: f8E4M3FN, %as: f8E8M0FNU, %bs: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %a, %as : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %acc, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<4x3x32xf32>
  return %y : tensor<4x3x32xf32>
}

// A body that does something else is no matmul of ours.
// CHECK-LABEL: func.func @other_body
// CHECK: linalg.generic
// CHECK: arith.maximumf
func.func @other_body(%x: tensor<4x2x32xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<16x2x32xf8E4M3FN>, %ws: tensor<16x2xf8E8M0FNU>) -> tensor<4x16xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x16xf32>
  %y = linalg.generic {indexing_maps = [#x, #w, #xs, #ws, #y],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}
      ins(%x, %w, %xs, %ws : tensor<4x2x32xf8E4M3FN>, tensor<16x2x32xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<16x2xf8E8M0FNU>)
      outs(%zero : tensor<4x16xf32>) {
  ^bb0(%a: f8E4M3FN, %b: f8E4M3FN, %as: f8E8M0FNU, %bs: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %a, %as : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.maximumf %acc, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<4x16xf32>
  return %y : tensor<4x16xf32>
}
