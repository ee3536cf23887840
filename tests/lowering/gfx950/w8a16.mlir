// RUN: block32 compile %s --target=gfx950 --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=ISA --input-file=%t.dir/module_w8a16_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=F32 --input-file=%t.dir/module_w8a16_linked_rocm_hsaco_fb.rocmasm

// An activation without scales: the weight becomes bf16 on its way to the matrix unit.

util.global private @scales = dense<120> : tensor<2x16xi8>
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK: w8a16.mlir:[[LINE:[0-9]+]]:8: remark: 8x64x512_bf16_e4m3_32x32_f32: gfx950 packed 16x32x256
// ISA-LABEL: gemm_tier0_0_8x64x512_bf16_e4m3_32x32_f32:
// ISA: v_cvt_scalef32_pk_bf16_fp8
// ISA: v_mfma_f32_16x16x32_bf16 {{.*}}, 0
// ISA: v_pk_fma_f32
// ISA-NOT: v_cvt_pk_bf16_f32
// ISA: s_endpgm
func.func @half(%x: tensor<8x512xbf16>, %w: tensor<64x512xf8E4M3FN>) -> tensor<8x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y] {block32.rhs = {block = [32, 32], scale = @scales}}
    ins(%x, %w : tensor<8x512xbf16>, tensor<64x512xf8E4M3FN>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  return %r : tensor<8x64xf32>
}

// Three bf16 make an f32: the first product starts from zero, two more are added to it.
// CHECK: w8a16.mlir:[[LINE:[0-9]+]]:8: remark: 9x64x512_f32_e4m3_32x32_f32: gfx950 packed 16x32x256
// F32-LABEL: gemm_tier0_1_9x64x512_f32_e4m3_32x32_f32:
// F32: v_cvt_pk_bf16_f32
// F32: v_mfma_f32_16x16x32_bf16 v{{\[}}[[SUM:[0-9]+:[0-9]+]]], {{.*}}, 0
// F32: v_mfma_f32_16x16x32_bf16 v{{\[}}[[SUM]]], {{.*}}, v{{\[}}[[SUM]]]
// F32: v_mfma_f32_16x16x32_bf16 v{{\[}}[[SUM]]], {{.*}}, v{{\[}}[[SUM]]]
func.func @single(%x: tensor<9x512xf32>, %w: tensor<64x512xf8E4M3FN>) -> tensor<9x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<9x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y] {block32.rhs = {block = [32, 32], scale = @scales}}
    ins(%x, %w : tensor<9x512xf32>, tensor<64x512xf8E4M3FN>)
    outs(%zero : tensor<9x64xf32>) -> tensor<9x64xf32>
  return %r : tensor<9x64xf32>
}
