// RUN: block32-opt --pass-pipeline='builtin.module(block32-select-kernel{target=cpu cpu-features=+avx2,+fma,+f16c architecture=x86_64})' %s 2>%t | FileCheck %s
// RUN: cat %t | FileCheck %s --check-prefix=REMARK

// The CPU's features decide the instruction set; a kernel that the user asked for is kept; one for
// another target is not.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

// CHECK-LABEL: func.func @dynamic
// CHECK: linalg.scaled_contract {{.*}}block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "avx2", max_m = 1 : i64,
// CHECK-SAME: {form = "tiled", isa = "avx2"
func.func @dynamic(%x: tensor<?x64xf8E4M3FN>, %xs: tensor<?x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>, %y: tensor<?x32xf32>) -> tensor<?x32xf32> {
  %cst = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%cst : f32) outs(%y : tensor<?x32xf32>) -> tensor<?x32xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<?x32xf32>) -> tensor<?x32xf32>
  return %r : tensor<?x32xf32>
}

// CHECK-LABEL: func.func @asked_for
// CHECK: block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "generic", mma = [4, 1, 32], tile = [4, 64, 32]}]}
// CHECK-LABEL: func.func @for_another_target
// CHECK: block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "avx2"
func.func @asked_for(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "cpu", tiers = [{form = "stream", isa = "generic", mma = [4, 1, 32], tile = [4, 64, 32]}]}}
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %r : tensor<4x32xf32>
}

func.func @for_another_target(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>,
    %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    {block32.kernel = {target = "gfx950", tiers = [{form = "packed"}]}}
    ins(%x, %xs, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
    outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %r : tensor<4x32xf32>
}

// REMARK: select_kernel.mlir:{{[0-9]+}}:8: remark: Mx32x64_e4m3_e4m3_32x32_f32: cpu M <= 1: avx2 stream {{.*}}tuned for avx2 processors
// REMARK: remark: 4x32x64_e4m3_e4m3_32x32_f32: cpu generic stream 4x64x32 (asked for by block32.kernel)
// REMARK: remark: block32.kernel for gfx950 ignored on cpu
// REMARK: remark: 4x32x64_e4m3_e4m3_32x32_f32: cpu avx2 stream
// REMARK-NOT: remark
