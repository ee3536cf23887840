// RUN: block32-opt --pass-pipeline='builtin.module(block32-fuse{target=cpu})' %s | FileCheck %s

// A consumer of a grouped matmul stays: it also reads the rows of no group.

#mn = affine_map<(m, n) -> (m, n)>
util.func private @experts(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
                           %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32>
    attributes {inlining_policy = #util.inline.never, block32.composite = {kind = "grouped_matmul", problem = {
        k = 32 : i64, n = 8 : i64, lhs = "bf16", lhs_scaled = false, rhs = "f8E4M3FN", rhs_block = [32, 32],
        result = "f32", grouping = {experts = 2 : i64, groups = 2 : i64}}}} {
  util.return %init : tensor<?x8xf32>
}

// CHECK-LABEL: func.func @relu(
// CHECK: %[[Y:.+]] = util.call @experts(
// CHECK: %[[R:.+]] = linalg.generic {{.*}} ins(%[[Y]] : tensor<?x8xf32>)
// CHECK: arith.maximumf
// CHECK: return %[[R]]
func.func @relu(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
                %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = util.call @experts(%x, %w, %ws, %offsets, %ids, %init)
      : (tensor<?x32xbf16>, tensor<2x8x32xf8E4M3FN>, tensor<2x1x1xf8E8M0FNU>, tensor<3xi32>, tensor<2xi32>, tensor<?x8xf32>) -> tensor<?x8xf32>
  %r = linalg.generic {indexing_maps = [#mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%y : tensor<?x8xf32>) outs(%init : tensor<?x8xf32>) {
  ^bb0(%a: f32, %o: f32):
    %zero = arith.constant 0.0 : f32
    %m = arith.maximumf %a, %zero : f32
    linalg.yield %m : f32
  } -> tensor<?x8xf32>
  return %r : tensor<?x8xf32>
}
