// RUN: block32-opt --pass-pipeline='builtin.module(block32-select-kernel{target=portable})' %s 2>&1 | FileCheck %s

// CHECK: util.call @experts{{.*}} {block32.kernel = {target = "portable", tiers = [{form = "portable"}]}}
// CHECK: remark: Mx8x32_bf16_e4m3_32x32_f32_2experts_2groups: portable portable
util.func private @experts(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
                           %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32>
    attributes {inlining_policy = #util.inline.never, block32.composite = {kind = "grouped_matmul", problem = {
        k = 32 : i64, n = 8 : i64, lhs = "bf16", lhs_scaled = false, rhs = "f8E4M3FN", rhs_block = [32, 32],
        result = "f32", grouping = {experts = 2 : i64, groups = 2 : i64}}}} {
  util.return %init : tensor<?x8xf32>
}
func.func @f(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
             %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32> {
  %y = util.call @experts(%x, %w, %ws, %offsets, %ids, %init)
      : (tensor<?x32xbf16>, tensor<2x8x32xf8E4M3FN>, tensor<2x1x1xf8E8M0FNU>, tensor<3xi32>, tensor<2xi32>, tensor<?x8xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
