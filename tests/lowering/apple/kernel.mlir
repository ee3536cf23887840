// REQUIRES: llvmlite
// RUN: block32 compile %s --target=apple-m5 -o %t 2> %t.remarks
// RUN: FileCheck %s --check-prefix=REMARK --input-file=%t.remarks
// RUN: block32 inspect %t --disassemble --kernel tier1 | FileCheck %s

// From a model to what Apple's loader sees: e4m3 on both sides, 32x32 weight scales.

// REMARK: remark: Mx96x256_e4m3_e4m3_32x32_bf16: apple-m5 M <= 1: gemv 1x4x16; tiled 64x64x32

// CHECK: target triple = "air64_v28-apple-macosx26.0.0"
// CHECK: %struct.Bindings = type { i8 addrspace(1)*, i8 addrspace(1)*, i8 addrspace(1)*, i8 addrspace(1)*, bfloat addrspace(1)* }
// CHECK: define void @gemm_tier1_0_Mx96x256_e4m3_e4m3_32x32_bf16(%struct.Bindings addrspace(2)* noundef %bindings, i32 addrspace(2)* noundef %constants, <3 x i32> noundef %threadgroup, i32 noundef %lane, i32 noundef %simdgroup)

// The number of rows is push constant 0; its tiles are padded to a power of two.
// CHECK: [[M:%v[0-9]+]] = load i32, i32 addrspace(2)* %constants, align 4
// CHECK: [[TILE:%v[0-9]+]] = lshr i32 {{%v[0-9]+}}, 6
// CHECK-NEXT: call i32 @air.clz.i32(i32 [[TILE]], i1 false)

// The loop over 128 K: scale bytes as words, then for each 32 K two steps into zero, and the scale.
// CHECK: phi i32 [ 0,
// CHECK-NEXT: [[ACC:%v[0-9]+]] = phi <8 x float> [ zeroinitializer,
// CHECK: icmp slt i32 {{%v[0-9]+}}, 256
// CHECK: [[WORD:%v[0-9]+]] = load <4 x i8>, <4 x i8> addrspace(1)* {{%v[0-9]+}}, align 4
// CHECK: zext <4 x i8> [[WORD]] to <4 x i32>
// CHECK: [[HALF:%v[0-9]+]] = call <8 x float> @air.simdgroup_matrix_16x16x16_multiply_accumulate.f.f.v8f32.v8f8e4m3fn.v8f8e4m3fn.v8f32(<8 x i8> {{%v[0-9]+}}, i1 false, <8 x i8> {{%v[0-9]+}}, i1 true, <8 x float> zeroinitializer)
// CHECK: [[SUM:%v[0-9]+]] = call <8 x float> @air.simdgroup_matrix{{[a-z0-9_.]+}}(<8 x i8> {{%v[0-9]+}}, i1 false, <8 x i8> {{%v[0-9]+}}, i1 true, <8 x float> [[HALF]])
// CHECK: [[FACTOR:%v[0-9]+]] = shufflevector <4 x float> {{%v[0-9]+}}, <4 x float> {{%v[0-9]+}}, <8 x i32> <i32 0, i32 0, i32 0, i32 0, i32 4, i32 4, i32 4, i32 4>
// CHECK: [[ONCE:%v[0-9]+]] = fmul <8 x float> [[SUM]], [[FACTOR]]
// CHECK-NEXT: [[TWICE:%v[0-9]+]] = fmul contract <8 x float> [[ONCE]], {{%v[0-9]+}}
// CHECK-NEXT: fadd contract <8 x float> [[ACC]], [[TWICE]]
// CHECK-NOT: load i8, i8 addrspace(1)*
// CHECK: add nsw i32 {{%v[0-9]+}}, 128

// One rounding, at the store.
// CHECK: fptrunc float {{%v[0-9]+}} to bfloat
// CHECK: store <4 x bfloat>
// CHECK-NOT: fptrunc <

// CHECK-LABEL: declare i32 @air.clz.i32(i32, i1)
// CHECK: attributes #{{[0-9]+}} = { convergent mustprogress nounwind willreturn }
// CHECK: !air.kernel = !{[[KERNEL:![0-9]+]]}
// CHECK: !{i32 0, !"air.indirect_buffer", !"air.buffer_size", i32 40, !"air.location_index", i32 0, i32 1, !"air.read", !"air.address_space", i32 2, !"air.struct_type_info",

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>
func.func @main(%x: tensor<?x256xf8E4M3FN>, %xs: tensor<?x8xf8E8M0FNU>,
    %w: tensor<96x256xf8E4M3FN>, %ws: tensor<3x8xf8E8M0FNU>, %y: tensor<?x96xbf16>)
    -> tensor<?x96xbf16> {
  %cst = arith.constant 0.0 : bf16
  %zero = linalg.fill ins(%cst : bf16) outs(%y : tensor<?x96xbf16>) -> tensor<?x96xbf16>
  %r = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
    ins(%x, %xs, %w, %ws : tensor<?x256xf8E4M3FN>, tensor<?x8xf8E8M0FNU>,
        tensor<96x256xf8E4M3FN>, tensor<3x8xf8E8M0FNU>)
    outs(%zero : tensor<?x96xbf16>) -> tensor<?x96xbf16>
  return %r : tensor<?x96xbf16>
}
