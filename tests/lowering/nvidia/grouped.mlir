// RUN: block32 compile %s --target=sm_90a --iree-hal-dump-executable-files-to=%t.90 -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=PTX --input-file=%t.90/module_block32_kernels_0_Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups_cuda_nvptx_fb.ptx
// RUN: block32 compile %s --target=sm_89 --iree-hal-dump-executable-files-to=%t.89 -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=PTX --input-file=%t.89/module_block32_kernels_0_Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups_cuda_nvptx_fb.ptx

// A weight for each group of rows: one dispatch. A workgroup counts the groups that start before
// its tile, one a lane, and reads its expert's number before it multiplies.

// CHECK: remark: Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups: sm_{{89|90a}} M <= 24: stream 8x32x128; M <= 48: stream 16x32x128; M <= 96: stream 32x32x128; M <= 192: tiled 64x64x64; tiled
// PTX-LABEL: .entry gemm_tier0_0_Mx64x512_bf16_e4m3_32x32_f32_2experts_3groups(
// PTX-NOT: cp.async
// PTX: vote.sync.ballot.b32
// PTX: popc.b32
// PTX: ld.global.nc.b32
// PTX: cp.async.cg.shared.global
// PTX: mma.sync.aligned.m16n8k16
// PTX: ret
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
