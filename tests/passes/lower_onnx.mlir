// RUN: block32-opt --pass-pipeline='builtin.module(block32-lower-onnx)' %s -o %t 2>&1 | FileCheck %s --check-prefix=WARN
// RUN: cat %t | FileCheck %s

// What iree-import-onnx writes for DequantizeLinear with blocks becomes linalg, with E8M0 scales
// where they are powers of two.

// The first axis, a short last block, f16.
// CHECK-DAG: [[AXIS0:#.+]] = affine_map<(d0, d1, d2) -> (d0, d2)>
// CHECK-DAG: [[AXIS1:#.+]] = affine_map<(d0, d1, d2) -> (d0, d1)>
// CHECK-LABEL: func.func @first_axis
// CHECK: arith.constant dense<{{\[\[}}126, -128], [127, 112], [-127, 0{{\]\]}}> : tensor<3x2xi8>
// CHECK: flow.tensor.bitcast {{.*}} : tensor<3x2xi8> -> tensor<3x2xf8E8M0FNU>
// CHECK: linalg.generic {indexing_maps = [[[AXIS0]], {{#.+}}]
// CHECK: tensor.collapse_shape {{.*}} : tensor<3x32x2xf8E8M0FNU> into tensor<96x2xf8E8M0FNU>
// CHECK: tensor.extract_slice {{.*}} : tensor<96x2xf8E8M0FNU> to tensor<72x2xf8E8M0FNU>
// CHECK: arith.scaling_extf {{.*}} : f8E4M3FN, f8E8M0FNU to f32
// CHECK-NOT: onnx.DequantizeLinear
func.func @first_axis(%w: !torch.vtensor<[72,2],f8E4M3FN>) -> !torch.vtensor<[72,2],f32> {
  %s = torch.operator "onnx.Constant"() {torch.onnx.value = dense<[[0.5, 2.0], [1.0, 3.0517578125e-05], [4.0, 5.877471754111437539843683E-39]]> : tensor<3x2xf32>} : () -> !torch.vtensor<[3,2],f32>
  %d = torch.operator "onnx.DequantizeLinear"(%w, %s) {torch.onnx.axis = -2 : si64, torch.onnx.block_size = 32 : si64} : (!torch.vtensor<[72,2],f8E4M3FN>, !torch.vtensor<[3,2],f32>) -> !torch.vtensor<[72,2],f32>
  return %d : !torch.vtensor<[72,2],f32>
}

// The second axis is the default; f16 scales, a zero point of 0, e5m2.
// CHECK-LABEL: func.func @second_axis
// CHECK: linalg.generic {indexing_maps = [[[AXIS1]], {{#.+}}]
// CHECK: tensor.collapse_shape {{.*}} : tensor<2x2x128xf8E8M0FNU> into tensor<2x256xf8E8M0FNU>
// CHECK: arith.scaling_extf {{.*}} : f8E5M2, f8E8M0FNU to f16
func.func @second_axis(%w: !torch.vtensor<[2,256],f8E5M2>) -> !torch.vtensor<[2,256],f16> {
  %s = torch.operator "onnx.Constant"() {torch.onnx.value = dense<0.5> : tensor<2x2xf16>} : () -> !torch.vtensor<[2,2],f16>
  %z = torch.operator "onnx.Constant"() {torch.onnx.value = dense<0.0> : tensor<2x2xf8E5M2>} : () -> !torch.vtensor<[2,2],f8E5M2>
  %d = torch.operator "onnx.DequantizeLinear"(%w, %s, %z) {torch.onnx.block_size = 128 : si64} : (!torch.vtensor<[2,256],f8E5M2>, !torch.vtensor<[2,2],f16>, !torch.vtensor<[2,2],f8E5M2>) -> !torch.vtensor<[2,256],f16>
  return %d : !torch.vtensor<[2,256],f16>
}

// Other scales are multiplied as they are, and said.
// CHECK-LABEL: func.func @no_power_of_two
// CHECK: arith.extf {{.*}} : f8E4M3FN to f32
// CHECK: arith.mulf
// WARN: warning: is dequantised by IREE's own code: expected scales 2^n but its scales hold 0.0123 at [0, 1]
func.func @no_power_of_two(%w: !torch.vtensor<[2,32],f8E4M3FN>) -> !torch.vtensor<[2,32],f32> {
  %t = torch.operator "onnx.Constant"() {torch.onnx.value = dense<[[0.5, 0.0123]]> : tensor<1x2xf32>} : () -> !torch.vtensor<[1,2],f32>
  %wt = torch.operator "onnx.Transpose"(%w) {torch.onnx.perm = [1 : si64, 0 : si64]} : (!torch.vtensor<[2,32],f8E4M3FN>) -> !torch.vtensor<[32,2],f8E4M3FN>
  %e = torch.operator "onnx.DequantizeLinear"(%wt, %t) {torch.onnx.axis = 0 : si64, torch.onnx.block_size = 32 : si64} : (!torch.vtensor<[32,2],f8E4M3FN>, !torch.vtensor<[1,2],f32>) -> !torch.vtensor<[32,2],f32>
  %d = torch.operator "onnx.Transpose"(%e) {torch.onnx.perm = [1 : si64, 0 : si64]} : (!torch.vtensor<[32,2],f32>) -> !torch.vtensor<[2,32],f32>
  return %d : !torch.vtensor<[2,32],f32>
}

// WARN: warning: is dequantised by IREE's own code: expected scales 2^n but its scales are not known
// CHECK-LABEL: func.func @run_time_scales
// CHECK: arith.mulf
func.func @run_time_scales(%w: !torch.vtensor<[2,32],f8E4M3FN>, %s: !torch.vtensor<[2,1],f32>) -> !torch.vtensor<[2,32],f32> {
  %d = torch.operator "onnx.DequantizeLinear"(%w, %s) {torch.onnx.block_size = 32 : si64} : (!torch.vtensor<[2,32],f8E4M3FN>, !torch.vtensor<[2,1],f32>) -> !torch.vtensor<[2,32],f32>
  return %d : !torch.vtensor<[2,32],f32>
}

// Integers and whole tensors are IREE's business.
// CHECK-LABEL: func.func @left_alone
// CHECK: onnx.DequantizeLinear
func.func @left_alone(%w: !torch.vtensor<[2,32],si8>, %s: !torch.vtensor<[],f32>, %z: !torch.vtensor<[],si8>) -> !torch.vtensor<[2,32],f32> {
  %d = torch.operator "onnx.DequantizeLinear"(%w, %s, %z) : (!torch.vtensor<[2,32],si8>, !torch.vtensor<[],f32>, !torch.vtensor<[],si8>) -> !torch.vtensor<[2,32],f32>
  return %d : !torch.vtensor<[2,32],f32>
}
