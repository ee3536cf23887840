// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise,block32-fuse{target=cpu})' %s | FileCheck %s

// Epilogues on the batch of one that importers emit: operands are brought to the shape of [M, N].

#bmn = affine_map<(b, m, n) -> (b, m, n)>
#bias = affine_map<(b, m, n) -> (n)>
util.global private @ws = dense<127> : tensor<1x2xi8>

// CHECK-LABEL: func.func @bias_and_residual(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<1x?x64xf32>, %[[W:[a-z0-9]+]]: tensor<1x64x32xf8E4M3FN>, %[[BIAS:[a-z0-9]+]]: tensor<32xf32>, %[[R:[a-z0-9]+]]: tensor<1x?x32xf32>
// CHECK: %[[FLAT:.+]] = tensor.collapse_shape %[[R]] {{\[\[}}0, 1], [2]] : tensor<1x?x32xf32> into tensor<?x32xf32>
// CHECK: %[[Y:.+]] = util.call @block32_matmul_w8a16_{{.*}}(%{{.+}}, %{{.+}}, %{{.+}}, %[[BIAS]], %[[FLAT]])
// CHECK: tensor.expand_shape %[[Y]] {{\[\[}}0, 1], [2]]
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @bias_and_residual(%x: tensor<1x?x64xf32>, %w: tensor<1x64x32xf8E4M3FN>, %b: tensor<32xf32>, %r: tensor<1x?x32xf32>) -> tensor<1x?x32xf32> {
  %c1 = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %m = tensor.dim %x, %c1 : tensor<1x?x64xf32>
  %e = tensor.empty(%m) : tensor<1x?x32xf32>
  %f = linalg.fill ins(%zero : f32) outs(%e : tensor<1x?x32xf32>) -> tensor<1x?x32xf32>
  %y = linalg.batch_matmul {block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<1x?x64xf32>, tensor<1x64x32xf8E4M3FN>) outs(%f : tensor<1x?x32xf32>) -> tensor<1x?x32xf32>
  %n = tensor.dim %y, %c1 : tensor<1x?x32xf32>
  %e1 = tensor.empty(%n) : tensor<1x?x32xf32>
  %s = linalg.generic {indexing_maps = [#bmn, #bias, #bmn], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%y, %b : tensor<1x?x32xf32>, tensor<32xf32>) outs(%e1 : tensor<1x?x32xf32>) {
  ^bb0(%in: f32, %bias: f32, %out: f32):
    %0 = arith.addf %in, %bias : f32
    linalg.yield %0 : f32
  } -> tensor<1x?x32xf32>
  %t = linalg.generic {indexing_maps = [#bmn, #bmn, #bmn], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%r, %s : tensor<1x?x32xf32>, tensor<1x?x32xf32>) outs(%e1 : tensor<1x?x32xf32>) {
  ^bb0(%res: f32, %in: f32, %out: f32):
    %0 = arith.addf %res, %in : f32
    linalg.yield %0 : f32
  } -> tensor<1x?x32xf32>
  return %t : tensor<1x?x32xf32>
}

// A sigmoid and a product with it, as two ops, are SiLU.
// CHECK-LABEL: func.func @silu_of_two_ops
// CHECK: util.call @block32_matmul_w8a16_{{.*}}
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @silu_of_two_ops(%x: tensor<4x64xf32>, %w: tensor<64x32xf8E4M3FN>) -> tensor<4x32xf32> {
  %one = arith.constant 1.0 : f32
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul {block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x64xf32>, tensor<64x32xf8E4M3FN>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %e = tensor.empty() : tensor<4x32xf32>
  %s = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<4x32xf32>) outs(%e : tensor<4x32xf32>) {
  ^bb0(%in: f32, %out: f32):
    %0 = arith.negf %in : f32
    %1 = math.exp %0 : f32
    %2 = arith.addf %1, %one : f32
    %3 = arith.divf %one, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<4x32xf32>
  %p = linalg.generic {indexing_maps = [affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m, n)>, affine_map<(m, n) -> (m, n)>], iterator_types = ["parallel", "parallel"]}
      ins(%s, %y : tensor<4x32xf32>, tensor<4x32xf32>) outs(%e : tensor<4x32xf32>) {
  ^bb0(%a: f32, %b: f32, %out: f32):
    %0 = arith.mulf %a, %b : f32
    linalg.yield %0 : f32
  } -> tensor<4x32xf32>
  return %p : tensor<4x32xf32>
}

// One activation is quantised once for the matmuls that read it; another one by itself.
// CHECK-LABEL: func.func @shared
// CHECK: %[[Q:.+]]:2 = util.call @block32_quantize
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
// CHECK: util.call @block32_matmul_dynamic_4x32x64_f32_rceil_e4m3_32x32_f32
// CHECK-NOT: util.call
// CHECK: return
func.func @shared(%x: tensor<1x4x64xf32>, %z: tensor<1x4x64xf32>, %w: tensor<1x64x32xf8E4M3FN>) -> (tensor<1x4x32xf32>, tensor<1x4x32xf32>, tensor<1x4x32xf32>) {
  %zero = arith.constant dense<0.0> : tensor<1x4x32xf32>
  %a = linalg.batch_matmul {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<1x4x64xf32>, tensor<1x64x32xf8E4M3FN>) outs(%zero : tensor<1x4x32xf32>) -> tensor<1x4x32xf32>
  %b = linalg.batch_matmul {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<1x4x64xf32>, tensor<1x64x32xf8E4M3FN>) outs(%zero : tensor<1x4x32xf32>) -> tensor<1x4x32xf32>
  %c = linalg.batch_matmul {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%z, %w : tensor<1x4x64xf32>, tensor<1x64x32xf8E4M3FN>) outs(%zero : tensor<1x4x32xf32>) -> tensor<1x4x32xf32>
  return %a, %b, %c : tensor<1x4x32xf32>, tensor<1x4x32xf32>, tensor<1x4x32xf32>
}
