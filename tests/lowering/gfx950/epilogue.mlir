// RUN: block32 compile %s --target=gfx950 --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=SUM --input-file=%t.dir/module_epilogue_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=ISA --input-file=%t.dir/module_epilogue_linked_rocm_hsaco_fb.rocmasm

// What follows a matmul and is in the closed list is done in its kernel, before the one rounding.
// What is not in the list stays an operation of its own, and so a dispatch of IREE's.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
#mn = affine_map<(m, n) -> (m, n)>
#n = affine_map<(m, n) -> (n)>

// CHECK: epilogue.mlir:[[LINE:[0-9]+]]:8: remark: 8x64x512_e4m3_e4m3_32x32_bf16 with bias, residual, relu: gfx950 packed
// SUM-LABEL: gemm_tier0_0_8x64x512_e4m3_e4m3_32x32_bf16:
// SUM: v_mfma_scale_f32_16x16x128_f8f6f4
// SUM: buffer_load_ushort
// SUM: buffer_load_ushort
// SUM: v_cmp_ngt_f32
// SUM: v_cndmask_b32
// SUM: v_cvt_pk_bf16_f32
// SUM: buffer_store
// SUM-LABEL: cosine_dispatch_0
func.func @bias_residual_relu_cast(%x: tensor<8x512xf8E4M3FN>, %xs: tensor<8x16xf8E8M0FNU>,
    %w: tensor<64x512xf8E4M3FN>, %ws: tensor<2x16xf8E8M0FNU>, %bias: tensor<64xbf16>,
    %residual: tensor<8x64xf16>) -> tensor<8x64xbf16> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<8x512xf8E4M3FN>, tensor<8x16xf8E8M0FNU>, tensor<64x512xf8E4M3FN>, tensor<2x16xf8E8M0FNU>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  %out = tensor.empty() : tensor<8x64xbf16>
  %z = linalg.generic {indexing_maps = [#mn, #n, #mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%r, %bias, %residual : tensor<8x64xf32>, tensor<64xbf16>, tensor<8x64xf16>)
      outs(%out : tensor<8x64xbf16>) {
  ^bb0(%a: f32, %b: bf16, %c: f16, %o: bf16):
    %b32 = arith.extf %b : bf16 to f32
    %c32 = arith.extf %c : f16 to f32
    %f0 = arith.constant 0.0 : f32
    %s = arith.addf %a, %b32 : f32
    %t = arith.addf %s, %c32 : f32
    %u = arith.maximumf %t, %f0 : f32
    %v = arith.truncf %u : f32 to bf16
    linalg.yield %v : bf16
  } -> tensor<8x64xbf16>
  return %z : tensor<8x64xbf16>
}

// A cosine is no epilogue: it keeps its dispatch.
// CHECK: epilogue.mlir:[[LINE:[0-9]+]]:8: remark: 8x96x512_e4m3_e4m3_32x32_f32: gfx950 packed
// ISA-LABEL: gemm_tier0_1_8x96x512_e4m3_e4m3_32x32_f32:
// ISA: buffer_store_dwordx2
// ISA: s_endpgm
// ISA-LABEL: cosine_dispatch_0
func.func @cosine(%x: tensor<8x512xf8E4M3FN>, %xs: tensor<8x16xf8E8M0FNU>,
    %w: tensor<96x512xf8E4M3FN>, %ws: tensor<3x16xf8E8M0FNU>) -> tensor<8x96xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x96xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<8x512xf8E4M3FN>, tensor<8x16xf8E8M0FNU>, tensor<96x512xf8E4M3FN>, tensor<3x16xf8E8M0FNU>)
    outs(%zero : tensor<8x96xf32>) -> tensor<8x96xf32>
  %out = tensor.empty() : tensor<8x96xf32>
  %z = linalg.generic {indexing_maps = [#mn, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%r : tensor<8x96xf32>) outs(%out : tensor<8x96xf32>) {
  ^bb0(%a: f32, %o: f32):
    %c = math.cos %a : f32
    linalg.yield %c : f32
  } -> tensor<8x96xf32>
  return %z : tensor<8x96xf32>
}
