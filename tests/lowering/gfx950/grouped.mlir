// RUN: block32 compile %s --target=gfx950 --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=ISA --input-file=%t.dir/module_block32_kernels_0_Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups_rocm_hsaco_fb.rocmasm

// A weight for each group of rows: one dispatch. A workgroup counts the groups that start before
// its tile, one a lane, and reads its expert's number before it multiplies.

// CHECK: remark: Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups: gfx950 M <= 48: packed 16x32x256; M <= 96: packed 32x32x256; packed 64x64x128
// ISA-LABEL: gemm_tier0_0_Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups:
// ISA: s_bcnt1_i32_b64
// ISA: v_mfma_f32_16x16x32_bf16
util.func private @experts(%x: tensor<?x512xbf16>, %w: tensor<2x64x512xf8E4M3FN>, %ws: tensor<2x2x16xf8E8M0FNU>,
                           %offsets: tensor<4xi32>, %ids: tensor<3xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32>
    attributes {inlining_policy = #util.inline.never, block32.composite = {kind = "grouped_matmul", problem = {
        k = 512 : i64, n = 64 : i64, lhs = "bf16", lhs_scaled = false, rhs = "f8E4M3FN", rhs_block = [32, 32],
        result = "f32", grouping = {experts = 2 : i64, groups = 3 : i64}}}} {
  util.return %init : tensor<?x64xf32>
}
func.func @f(%x: tensor<?x512xbf16>, %w: tensor<2x64x512xf8E4M3FN>, %ws: tensor<2x2x16xf8E8M0FNU>,
             %offsets: tensor<4xi32>, %ids: tensor<3xi32>, %init: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %y = util.call @experts(%x, %w, %ws, %offsets, %ids, %init)
      : (tensor<?x512xbf16>, tensor<2x64x512xf8E4M3FN>, tensor<2x2x16xf8E8M0FNU>, tensor<4xi32>, tensor<3xi32>, tensor<?x64xf32>) -> tensor<?x64xf32>
  return %y : tensor<?x64xf32>
}
