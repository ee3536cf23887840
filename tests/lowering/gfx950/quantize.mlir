// RUN: block32 compile %s --target=gfx950 --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=FUSED --input-file=%t.dir/module_quantize_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=LAUNCH --input-file=%t.dir/module_quantize_linked_rocm_hsaco_fb.rocmasm

// An activation that is quantised at run time, and read by one matmul alone.

#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
util.global private @ws = dense<120> : tensor<2x16xi8>

// For a few rows the kernel quantises what it multiplies: the largest magnitude is exchanged, the
// values become codes, the scale is exchanged, and the codes are multiplied.
// CHECK: quantize.mlir:{{[0-9]+}}:8: remark: 4x64x512_bf16_rceil_e4m3_32x32_f32: gfx950 packed 8x16x256 K_PACK 2 quantize fused {{.*}}; x is quantised (rceil) by the kernel that multiplies it
// FUSED-LABEL: gemm_tier0_0_4x64x512_bf16_rceil_e4m3_32x32_f32:
// FUSED: v_permlane16_swap
// FUSED: v_cvt_scalef32_pk_fp8_bf16
// FUSED: v_permlane32_swap
// FUSED: v_mfma_scale_f32_16x16x128_f8f6f4
func.func @few(%x: tensor<4x512xbf16>, %w: tensor<64x512xf8E4M3FN>) -> tensor<4x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x512xbf16>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r : tensor<4x64xf32>
}

// For more rows a launch of its own does.
// CHECK: quantize.mlir:{{[0-9]+}}:8: remark: 40x64x512_f32_rceil_e4m3_32x32_f32: gfx950 tiled 64x64x256 {{.*}}quantize separate {{.*}}; x is quantised (rceil) by a launch of its own
// LAUNCH-LABEL: quantize_tier0_1_40x64x512_f32_rceil_e4m3_32x32_f32:
// LAUNCH: v_mov_b32_dpp {{.*}} quad_perm:[1,0,3,2]
// LAUNCH: buffer_store_dword
// LAUNCH: buffer_store_byte
// LAUNCH: s_endpgm
func.func @many(%x: tensor<40x512xf32>, %w: tensor<64x512xf8E4M3FN>) -> tensor<40x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<40x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<40x512xf32>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<40x64xf32>) -> tensor<40x64xf32>
  return %r : tensor<40x64xf32>
}

// Codes that two matmuls read are made once, by a step of its own.
// CHECK: remark: 4x64x512_e4m3_e4m3_32x32_f32: gfx950 packed 8x16x256 K_PACK 2 (default tiles)
// CHECK: remark: 4x64x512_e4m3_e4m3_32x32_f32: gfx950 packed 8x16x256 K_PACK 2 (default tiles)
func.func @shared(%x: tensor<4x512xbf16>, %w: tensor<64x512xf8E4M3FN>, %v: tensor<64x512xf8E4M3FN>)
    -> (tensor<4x64xf32>, tensor<4x64xf32>) {
  %zero = arith.constant dense<0.0> : tensor<4x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x512xbf16>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  %s = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %v : tensor<4x512xbf16>, tensor<64x512xf8E4M3FN>) outs(%zero : tensor<4x64xf32>) -> tensor<4x64xf32>
  return %r, %s : tensor<4x64xf32>, tensor<4x64xf32>
}
