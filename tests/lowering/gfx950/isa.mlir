// RUN: block32 compile %s --target=gfx950 --iree-hal-dump-executable-files-to=%t.dir -o %t.vmfb
// RUN: FileCheck %s --check-prefix=TILED --input-file=%t.dir/module_isa_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=PACKED --input-file=%t.dir/module_isa_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=SPLIT --input-file=%t.dir/module_isa_linked_rocm_hsaco_fb.rocmasm
// RUN: FileCheck %s --check-prefix=SPILLS --input-file=%t.dir/module_isa_linked_rocm_hsaco_fb.rocmasm

// The machine code that the kernels rest on.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// The first step of x is on its way to LDS before the loop. Scales are in vector registers: with a
// scalar register or a constant in their place the hardware would take other bits. The second
// instruction of a window takes the second byte of the same registers.
// TILED-LABEL: gemm_tier0_0_64x128x1024_e4m3_e4m3_32x32_f32:
// TILED: buffer_load_dwordx4 v{{[0-9]+}}, s[{{[0-9:]+}}], {{.*}} offen lds
// TILED: s_waitcnt vmcnt
// TILED: s_barrier
// TILED: ds_read_b128
// TILED-NOT: v_mfma_scale{{.*}}, s{{[0-9]+}}
// TILED-NOT: v_mfma_scale{{.*}}, {{[0-9]+}} op_sel_hi
// TILED: v_mfma_scale_f32_16x16x128_f8f6f4 {{.*}}, v{{[0-9]+}}, v{{[0-9]+}} op_sel_hi:[0,0,0]
// TILED-NOT: v_mfma_scale{{.*}}, s{{[0-9]+}}
// TILED-NOT: v_mfma_scale{{.*}}, {{[0-9]+}} op_sel_hi
// TILED: v_mfma_scale_f32_16x16x128_f8f6f4 {{.*}}, v{{[0-9]+}}, v{{[0-9]+}} op_sel:[1,1,0] op_sel_hi:[0,0,0]
// TILED-NOT: v_mfma_scale{{.*}}, s{{[0-9]+}}
// TILED-NOT: v_mfma_scale{{.*}}, {{[0-9]+}} op_sel_hi
// TILED: buffer_store_dwordx4
// TILED-NOT: scratch_
func.func @tiled(%x: tensor<64x1024xf8E4M3FN>, %xs: tensor<64x32xf8E8M0FNU>,
    %w: tensor<128x1024xf8E4M3FN>, %ws: tensor<4x32xf8E8M0FNU>) -> tensor<64x128xf32> {
  %zero = arith.constant dense<0.0> : tensor<64x128xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "tiled", tile = [64, 64, 256], warps = 4, stages = 2}]}}
    ins(%x, %xs, %w, %ws : tensor<64x1024xf8E4M3FN>, tensor<64x32xf8E8M0FNU>, tensor<128x1024xf8E4M3FN>, tensor<4x32xf8E8M0FNU>)
    outs(%zero : tensor<64x128xf32>) -> tensor<64x128xf32>
  return %r : tensor<64x128xf32>
}

// The weight streams to registers with the widest loads, and no barrier is met until the end.
// PACKED-LABEL: gemm_tier0_1_8x64x2048_e4m3_e4m3_32x32_f32:
// PACKED-NOT: s_barrier
// PACKED: buffer_load_dwordx4 v[{{[0-9:]+}}], v{{[0-9]+}}, s[{{[0-9:]+}}], {{.*}} offen
// PACKED-NOT: s_barrier
// PACKED: v_mfma_scale_f32_16x16x128_f8f6f4 {{.*}}, v{{[0-9]+}}, v{{[0-9]+}} op_sel_hi:[0,0,0]
// PACKED-NOT: s_barrier
// PACKED: s_cbranch
// PACKED: v_mov_b32_dpp {{.*}} quad_perm:[1,0,3,2]
// PACKED: ds_write
// PACKED: s_barrier
// PACKED-LABEL: gemm_tier0_0_64
func.func @packed(%x: tensor<8x2048xf8E4M3FN>, %xs: tensor<8x64xf8E8M0FNU>,
    %w: tensor<64x2048xf8E4M3FN>, %ws: tensor<2x64xf8E8M0FNU>) -> tensor<8x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<8x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "packed", tile = [8, 16, 128], k_pack = 2, warps = 2, stages = 2}]}}
    ins(%x, %xs, %w, %ws : tensor<8x2048xf8E4M3FN>, tensor<8x64xf8E8M0FNU>, tensor<64x2048xf8E4M3FN>, tensor<2x64xf8E8M0FNU>)
    outs(%zero : tensor<8x64xf32>) -> tensor<8x64xf32>
  return %r : tensor<8x64xf32>
}

// Partial sums go past the caches, are waited for, and only then counted; the last to arrive loads
// them past the caches again.
// SPLIT-LABEL: gemm_tier0_2_32x64x1024_e4m3_e4m3_32x32_f32:
// SPLIT: buffer_store_dwordx4 {{.*}} offen sc1
// SPLIT: s_waitcnt vmcnt(0)
// SPLIT-NEXT: s_barrier
// SPLIT: global_atomic_inc {{.*}} sc0
// SPLIT: s_barrier
// SPLIT: s_cbranch
// SPLIT-NOT: buffer_load_dwordx4 {{.*}} offen{{$}}
// SPLIT: buffer_load_dwordx4 {{.*}} offen sc1
// SPLIT: v_pk_add_f32
// SPLIT: buffer_store_dwordx4 {{.*}} offen{{$}}
// SPLIT-LABEL: gemm_tier0_1_8x
func.func @split(%x: tensor<32x1024xf8E4M3FN>, %xs: tensor<32x32xf8E8M0FNU>,
    %w: tensor<64x1024xf8E4M3FN>, %ws: tensor<2x32xf8E8M0FNU>) -> tensor<32x64xf32> {
  %zero = arith.constant dense<0.0> : tensor<32x64xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "tiled", tile = [32, 64, 256], warps = 4, stages = 2, splits = 2}]}}
    ins(%x, %xs, %w, %ws : tensor<32x1024xf8E4M3FN>, tensor<32x32xf8E8M0FNU>, tensor<64x1024xf8E4M3FN>, tensor<2x32xf8E8M0FNU>)
    outs(%zero : tensor<32x64xf32>) -> tensor<32x64xf32>
  return %r : tensor<32x64xf32>
}

// No kernel spills.
// SPILLS-LABEL: amdhsa.kernels
// SPILLS-NOT: .vgpr_spill_count: {{[1-9]}}
// SPILLS-NOT: .sgpr_spill_count: {{[1-9]}}
