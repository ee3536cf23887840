// RUN: block32 compile %s --target=sm_90a --iree-hal-dump-executable-files-to=%t.90 -o %t.vmfb 2>&1 | FileCheck %s --check-prefixes=REMARK,REMARK-90
// RUN: FileCheck %s --check-prefixes=FUSED,FUSED-90 --input-file=%t.90/module_quantize_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=LAUNCH --input-file=%t.90/module_quantize_linked_cuda_nvptx_fb.ptx
// RUN: block32 compile %s --target=sm_89 --iree-hal-dump-executable-files-to=%t.89 -o %t.vmfb 2>&1 | FileCheck %s --check-prefixes=REMARK,REMARK-89
// RUN: FileCheck %s --check-prefixes=FUSED,FUSED-89 --input-file=%t.89/module_quantize_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=LAUNCH --input-file=%t.89/module_quantize_linked_cuda_nvptx_fb.ptx

// An activation that is quantised at run time.

#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<120> : tensor<2x16xi8>

// For a few rows by the kernel: four lanes find a block's scale in two exchanges, and the codes go
// into the matrix instruction from registers. On Hopper they become f16 first.
// REMARK: remark: 4x64x512_bf16_rceil_e4m3_32x32_f32: sm_{{89|90a}} stream 8x32x128 quantize fused {{.*}}; x is quantised (rceil) by the kernel that multiplies it
// FUSED-LABEL: .entry gemm_tier0_0_4x64x512_bf16_rceil_e4m3_32x32_f32(
// FUSED-NOT: st.shared.b8
// FUSED: shfl.sync.bfly.b32 {{.*}}, 1, 31, -1
// FUSED: shfl.sync.bfly.b32 {{.*}}, 2, 31, -1
// FUSED: cvt.rn.satfinite.e4m3x2.f32
// FUSED-90: cvt.rn.f16x2.e4m3x2
// FUSED-90-NOT: mma.sync.aligned.m16n8k32
// FUSED-90: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
// FUSED-89-NOT: cvt.rn.f16x2.e4m3x2
// FUSED-89: mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32
// FUSED: ret
func.func @few(%x: tensor<4x512xbf16>, %w: tensor<64x512xf8E4M3FN>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x512xbf16>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}

// For more rows by a launch of its own, and the kernel that multiplies quantises nothing.
// REMARK: remark: 40x64x512_f32_rceil_e4m3_32x32_f32: sm_{{89|90a}} tiled 64x64x64 quantize separate {{.*}}; x is quantised (rceil) by a launch of its own
// LAUNCH-LABEL: .entry quantize_tier0_1_40x64x512_f32_rceil_e4m3_32x32_f32(
// LAUNCH: shfl.sync.bfly.b32 {{.*}}, 2, 31, -1
// LAUNCH: cvt.rn.satfinite.e4m3x2.f32
// LAUNCH: st.global.v2.b32
// LAUNCH: st.global.b8
// LAUNCH-LABEL: .entry gemm_tier0_1_40x64x512_f32_rceil_e4m3_32x32_f32(
// LAUNCH-NOT: cvt.rn.satfinite
// LAUNCH: mma.sync
// LAUNCH-NOT: cvt.rn.satfinite
// LAUNCH: ret
// LAUNCH-LABEL: .entry
func.func @many(%x: tensor<40x512xf32>, %w: tensor<64x512xf8E4M3FN>) -> tensor<40x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<40x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<40x512xf32>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<40x64xf32>) -> tensor<40x64xf32>
  return %r : tensor<40x64xf32>
}
