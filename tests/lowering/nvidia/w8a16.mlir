// RUN: block32 compile %s --target=sm_90a --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=HALF --input-file=%t.dir/module_w8a16_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=F32 --input-file=%t.dir/module_w8a16_linked_cuda_nvptx_fb.ptx

// An activation without scales, written as a matmul whose weight is marked. Kernels stand in the file
// last first: the label at the end of each keeps its checks inside of it.

util.global private @scales = dense<120> : tensor<2x16xi8>
#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>

// Three bf16 make an f32, the last two of which are zero for an infinity. A block of 32 K is two
// products for each part: the weights of the first come again with the next part, and the sum goes on.
// F32-LABEL: .entry gemm_tier0_1_9x64x512_f32_e4m3_32x32_f32(
// F32: abs.f32 [[MAGNITUDE:%r[0-9]+]],
// F32: setp.eq.f32 [[IS_INFINITE:%p[0-9]+]], [[MAGNITUDE]], 0f7F800000
// F32: selp.f32 {{%r[0-9]+}}, 0f00000000, {{%r[0-9]+}}, [[IS_INFINITE]]
// F32-NOT: mma.sync{{.*}}.f16.f16
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {[[SUM0:[^}]*]]}, {[[WEIGHTS:[^}]*]]}, {{{.*}}}, {[[ZERO:%r[0-9]+]], [[ZERO]], [[ZERO]], [[ZERO]]};
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {[[SUM1:[^}]*]]}, {[[MORE:[^}]*]]}, {{{.*}}}, {[[SUM0]]};
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {[[SUM2:[^}]*]]}, {[[WEIGHTS]]}, {{{.*}}}, {[[SUM1]]};
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {[[SUM3:[^}]*]]}, {[[MORE]]}, {{{.*}}}, {[[SUM2]]};
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {[[SUM4:[^}]*]]}, {[[WEIGHTS]]}, {{{.*}}}, {[[SUM3]]};
// F32: mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{.*}}}, {[[MORE]]}, {{{.*}}}, {[[SUM4]]};
// F32-NOT: mma.sync{{.*}}.f16.f16
// F32: ret
// F32-LABEL: .entry

// CHECK: w8a16.mlir:[[LINE:[0-9]+]]:8: remark: 8x64x512_f16_e4m3_32x32_f32: sm_90a stream 8x32x128
// HALF-LABEL: .entry gemm_tier0_0_8x64x512_f16_e4m3_32x32_f32(
// HALF: cvt.rn.f16x2.e4m3x2
// HALF: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
// HALF-NOT: .bf16
// HALF: ret
func.func @half(%x: tensor<8x512xf16>, %w: tensor<64x512xf8E4M3FN>) -> tensor<8x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y] {block32.rhs = {block = [32, 32], scale = @scales}}
    ins(%x, %w : tensor<8x512xf16>, tensor<64x512xf8E4M3FN>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  return %r : tensor<8x64xf32>
}

// CHECK: w8a16.mlir:[[LINE:[0-9]+]]:8: remark: 9x64x512_f32_e4m3_32x32_f32: sm_90a stream 16x32x128
func.func @single(%x: tensor<9x512xf32>, %w: tensor<64x512xf8E4M3FN>) -> tensor<9x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<9x64xf32>
  %r = linalg.matmul indexing_maps = [#x, #w, #y] {block32.rhs = {block = [32, 32], scale = @scales}}
    ins(%x, %w : tensor<9x512xf32>, tensor<64x512xf8E4M3FN>)
    outs(%zero : tensor<9x64xf32>) -> tensor<9x64xf32>
  return %r : tensor<9x64xf32>
}
