// RUN: not block32-opt --pass-pipeline='builtin.module(block32-select-kernel{target=cpu})' %s 2>&1 | FileCheck %s

// CHECK: {{.*}}:14:8: error: 'util.call' op asks for a kernel that cpu cannot run: expected splits 1 for groups of rows but got 2
util.func private @experts(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
                           %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32>
    attributes {inlining_policy = #util.inline.never, block32.composite = {kind = "grouped_matmul", problem = {
        k = 32 : i64, n = 8 : i64, lhs = "bf16", lhs_scaled = false, rhs = "f8E4M3FN", rhs_block = [32, 32],
        result = "f32", grouping = {experts = 2 : i64, groups = 2 : i64}}}} {
  util.return %init : tensor<?x8xf32>
}
func.func @f(%x: tensor<?x32xbf16>, %w: tensor<2x8x32xf8E4M3FN>, %ws: tensor<2x1x1xf8E8M0FNU>,
             %offsets: tensor<3xi32>, %ids: tensor<2xi32>, %init: tensor<?x8xf32>) -> tensor<?x8xf32> {
  // A group's rows have one workgroup a column range.
  %y = util.call @experts(%x, %w, %ws, %offsets, %ids, %init)
      {block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "generic", mma = [4, 1, 32], tile = [4, 128, 32], splits = 2, reduce = "second_launch"}]}}
      : (tensor<?x32xbf16>, tensor<2x8x32xf8E4M3FN>, tensor<2x1x1xf8E8M0FNU>, tensor<3xi32>, tensor<2xi32>, tensor<?x8xf32>) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}
