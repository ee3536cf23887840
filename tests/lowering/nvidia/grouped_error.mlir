// RUN: not block32 compile %s --target=sm_89 -o %t.vmfb 2>&1 | FileCheck %s

// Workgroups that share a tile along K are for one weight alone.

// CHECK: error: {{.*}} asks for a kernel that sm_89 cannot run: expected splits 1 for groups of rows but got 2
util.func private @experts(%x: tensor<?x512xbf16>, %w: tensor<2x64x512xf8E4M3FN>, %ws: tensor<2x2x16xf8E8M0FNU>,
                           %offsets: tensor<4xi32>, %ids: tensor<3xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32>
    attributes {inlining_policy = #util.inline.never, block32.composite = {kind = "grouped_matmul", problem = {
        k = 512 : i64, n = 64 : i64, lhs = "bf16", lhs_scaled = false, rhs = "f8E4M3FN", rhs_block = [32, 32],
        result = "f32", grouping = {experts = 2 : i64, groups = 3 : i64}}}} {
  util.return %init : tensor<?x64xf32>
}
func.func @f(%x: tensor<?x512xbf16>, %w: tensor<2x64x512xf8E4M3FN>, %ws: tensor<2x2x16xf8E8M0FNU>,
             %offsets: tensor<4xi32>, %ids: tensor<3xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %y = util.call @experts(%x, %w, %ws, %offsets, %ids, %init) {block32.kernel = {target = "sm_89", tiers = [{form = "stream", tile = [8, 32, 128], warps = 4, stages = 4, splits = 2}]}}
      : (tensor<?x512xbf16>, tensor<2x64x512xf8E4M3FN>, tensor<2x2x16xf8E8M0FNU>, tensor<4xi32>, tensor<3xi32>, tensor<?x64xf32>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}
