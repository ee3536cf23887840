// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise,block32-fuse{target=portable})' %s | FileCheck %s

// A target without a kernel that quantises keeps the two steps.

#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<127> : tensor<1x2xi8>

// CHECK-NOT: matmul_dynamic
// CHECK-LABEL: func.func @dynamic(
// CHECK: %[[Q:.+]]:2 = util.call @block32_quantize_4x64xf32_e4m3_floor(
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
func.func @dynamic(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic", rule = "floor"},
       block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x64xf32>, tensor<32x64xf8E4M3FN>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
