// RUN: block32 compile %s --target=sm_90a --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb
// RUN: FileCheck %s --check-prefix=STREAM --input-file=%t.dir/module_ptx_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=TILED --input-file=%t.dir/module_ptx_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=WGMMA --input-file=%t.dir/module_ptx_linked_cuda_nvptx_fb.ptx
// RUN: FileCheck %s --check-prefix=ONE-STEP --input-file=%t.dir/module_ptx_linked_cuda_nvptx_fb.ptx

// The instructions that the kernels rest on. Kernels stand in the file last first: the label at the end
// of each keeps its checks inside of it.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// Weights come 16 bytes at a time past the first-level cache, warps wait for their own copies alone,
// and fp8 becomes f16, which is exact: on sm_90 the fp8 mma.sync is no instruction of the hardware.
// STREAM-LABEL: .entry gemm_tier0_0_8x64x2048_e4m3_e4m3_32x32_f32(
// STREAM: .maxntid 128
// STREAM: .shared .align 1024 .b8 block32_shared[16]
// STREAM: cp.async.cg.shared.global [{{.*}}], [{{.*}}], 16
// STREAM: cp.async.commit_group
// STREAM-NOT: bar.sync
// STREAM: cp.async.wait_group 2
// STREAM: bar.warp.sync
// STREAM: ldmatrix.sync.aligned.m8n8.x4.shared.b16
// STREAM: cvt.rn.f16x2.e4m3x2
// STREAM: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
// STREAM-NOT: bar.sync
// STREAM: cp.async.wait_group 0
// STREAM: bar.sync
// STREAM-NOT: mma.sync.aligned.m16n8k32
// STREAM: ret
func.func @stream(%x: tensor<8x2048xf8E4M3FN>, %xs: tensor<8x64xf8E8M0FNU>,
    %w: tensor<64x2048xf8E4M3FN>, %ws: tensor<2x64xf8E8M0FNU>) -> tensor<8x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "sm_90a", tiers = [{form = "stream", tile = [8, 32, 128], warps = 4, stages = 4}]}}
    ins(%x, %xs, %w, %ws : tensor<8x2048xf8E4M3FN>, tensor<8x64xf8E8M0FNU>, tensor<64x2048xf8E4M3FN>, tensor<2x64xf8E8M0FNU>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  return %r : tensor<8x64xf32>
}

// Partial sums are fenced before the arrival is counted, once a workgroup, at device scope, and the
// last one fences again before it reads them: never through the read-only path.
// TILED-LABEL: .entry gemm_tier0_1_64x128x2048_e4m3_e4m3_32x32_f32(
// TILED: ldmatrix
// TILED: mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
// TILED: st.global.v4.b32
// TILED: membar.gl
// TILED: bar.sync
// TILED: atom.acq_rel.gpu.global.inc.u32 {{.*}}, 3;
// TILED: bar.sync
// TILED: membar.gl
// TILED-NOT: ld.global.nc
// TILED: ld.global.v4.b32
// TILED-NOT: ld.global.nc
// TILED: ret
// TILED-LABEL: .entry
func.func @tiled(%x: tensor<64x2048xf8E4M3FN>, %xs: tensor<64x64xf8E8M0FNU>,
    %w: tensor<128x2048xf8E4M3FN>, %ws: tensor<4x64xf8E8M0FNU>) -> tensor<64x128xf32> {
  %zero = arith.constant dense<0.0> : tensor<64x128xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "sm_90a", tiers = [{form = "tiled", tile = [64, 64, 64], warps = 4, stages = 4, splits = 4}]}}
    ins(%x, %xs, %w, %ws : tensor<64x2048xf8E4M3FN>, tensor<64x64xf8E8M0FNU>, tensor<128x2048xf8E4M3FN>, tensor<4x64xf8E8M0FNU>)
    outs(%zero : tensor<64x128xf32>) -> tensor<64x128xf32>
  return %r : tensor<64x128xf32>
}

// A stage's copies are made visible to the matrix unit before the barrier, and the unit works on the
// next block of K while the results of the one before are scaled.
// WGMMA-LABEL: .entry gemm_tier0_2_128x256x512_e4m3_e4m3_32x32_f32(
// WGMMA: cp.async.wait_group
// WGMMA: fence.proxy.async.shared::cta
// WGMMA: bar.sync
// WGMMA: wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3
// WGMMA: wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3
// WGMMA: wgmma.wait_group.sync.aligned 1
// WGMMA: fma.rn.f32
// WGMMA: wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3
// WGMMA: wgmma.wait_group.sync.aligned 1
// WGMMA: wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3
// WGMMA: wgmma.wait_group.sync.aligned 1
// WGMMA: wgmma.wait_group.sync.aligned 0
// WGMMA-NOT: wgmma.mma_async
// WGMMA: ret
// WGMMA-LABEL: .entry
func.func @wgmma(%x: tensor<128x512xf8E4M3FN>, %xs: tensor<128x16xf8E8M0FNU>,
    %w: tensor<256x512xf8E4M3FN>, %ws: tensor<8x16xf8E8M0FNU>) -> tensor<128x256xf32> {
  %zero = arith.constant dense<0.0> : tensor<128x256xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "sm_90a", tiers = [{form = "tiled", tile = [128, 128, 128], warps = 8, stages = 5, mma = [64, 128, 32]}]}}
    ins(%x, %xs, %w, %ws : tensor<128x512xf8E4M3FN>, tensor<128x16xf8E8M0FNU>, tensor<256x512xf8E4M3FN>, tensor<8x16xf8E8M0FNU>)
    outs(%zero : tensor<128x256xf32>) -> tensor<128x256xf32>
  return %r : tensor<128x256xf32>
}

// Where K fits in one step nothing is left of the loop. Each block's results are scaled behind its
// wait all the same, not where they are stored: four blocks' results are more than the registers.
// ONE-STEP-LABEL: .entry gemm_tier0_3_Mx64x128_e4m3_e4m3_32x32_f32(
// ONE-STEP-NOT: fma.rn.f32
// ONE-STEP: wgmma.wait_group.sync.aligned 1
// ONE-STEP: fma.rn.f32
// ONE-STEP: wgmma.mma_async
// ONE-STEP: wgmma.wait_group.sync.aligned 1
// ONE-STEP: fma.rn.f32
// ONE-STEP: wgmma.mma_async
// ONE-STEP: wgmma.wait_group.sync.aligned 1
// ONE-STEP: fma.rn.f32
// ONE-STEP: wgmma.wait_group.sync.aligned 0
// ONE-STEP: fma.rn.f32
// ONE-STEP: st.global
// ONE-STEP-NOT: fma.rn.f32
// ONE-STEP: ret
// ONE-STEP-LABEL: .entry
func.func @one_step(%x: tensor<?x128xf8E4M3FN>, %xs: tensor<?x4xf8E8M0FNU>,
    %w: tensor<64x128xf8E4M3FN>, %ws: tensor<2x4xf8E8M0FNU>, %init: tensor<?x64xf32>) -> tensor<?x64xf32> {
  %zero = arith.constant 0.0 : f32
  %zeros = linalg.fill ins(%zero : f32) outs(%init : tensor<?x64xf32>) -> tensor<?x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "sm_90a", tiers = [{form = "tiled", tile = [64, 64, 128], warps = 4, stages = 2, mma = [64, 64, 32]}]}}
    ins(%x, %xs, %w, %ws : tensor<?x128xf8E4M3FN>, tensor<?x4xf8E8M0FNU>, tensor<64x128xf8E4M3FN>, tensor<2x4xf8E8M0FNU>)
    outs(%zeros : tensor<?x64xf32>) -> tensor<?x64xf32>
  return %r : tensor<?x64xf32>
}
