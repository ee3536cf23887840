// RUN: block32-opt --pass-pipeline='builtin.module(block32-select-kernel{target=cpu},block32-outline)' %s | FileCheck %s

// A grouped matmul packs by its offsets, and updates the init that it was given.

// CHECK: hal.executable.export public @pack_tier0_0_Mx8x32_bf16_e4m3_32x32_f32_2experts_2groups
// CHECK: hal.executable.export public @gemm_tier0_0_
// CHECK: util.func private @block32_matmul_0_{{.*}}(%[[X:.+]]: tensor<?x32xbf16>, %[[W:.+]]: tensor<2x8x32xf8E4M3FN>, %[[WS:.+]]: tensor<2x1x1xf8E8M0FNU>, %[[OFFSETS:.+]]: tensor<3xi32>, %[[IDS:.+]]: tensor<2xi32>, %[[INIT:.+]]: tensor<?x8xf32>)
// CHECK: %[[PACKED:.+]]:3 = flow.dispatch {{.*}}@pack_tier0_{{.*}}(%{{.+}}, %[[X]], %[[OFFSETS]])
// CHECK: %[[Y:.+]]:2 = flow.dispatch {{.*}}@gemm_tier0_{{.*}}(%{{.+}}, %[[PACKED]]#0, %[[PACKED]]#1, %[[PACKED]]#2, %[[W]], %[[WS]], %[[OFFSETS]], %[[IDS]], %[[INIT]])
// CHECK-SAME: -> (%[[INIT]]{{.*}},
// CHECK: util.return %[[Y]]#0
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
