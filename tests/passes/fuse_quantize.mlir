// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise,block32-fuse{target=cpu},block32-select-kernel{target=cpu})' %s 2>&1 | FileCheck %s

// An activation that one matmul reads is quantised by that matmul, its epilogue in the same call.
// Two readers, or another format than f8E4M3FN, keep a step of its own.

#x = affine_map<(m, n, k) -> (m, k)>
#w = affine_map<(m, n, k) -> (n, k)>
#y = affine_map<(m, n, k) -> (m, n)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#wb = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#mn = affine_map<(m, n) -> (m, n)>
#n = affine_map<(m, n) -> (n)>
util.global private @ws = dense<127> : tensor<1x2xi8>
util.global private @vs = dense<128> : tensor<1x2xi8>

// CHECK-LABEL: func.func @one_reader(
// CHECK-SAME: %[[X:[a-z0-9]+]]: tensor<?x64xf32>, %[[W:[a-z0-9]+]]: tensor<32x64xf8E4M3FN>, %[[B:[a-z0-9]+]]: tensor<32xf32>
// CHECK-NOT: block32_quantize
// CHECK: util.call @block32_matmul_dynamic_Mx32x64_f32_rceil_e4m3_32x32_f32{{.*}}(%[[X]], %[[W]], %{{.+}}, %[[B]]) {block32.kernel = {{.*}}quantize = "fused"
// CHECK-NOT: linalg.generic
// CHECK: return
func.func @one_reader(%x: tensor<?x64xf32>, %w: tensor<32x64xf8E4M3FN>, %b: tensor<32xf32>, %e: tensor<?x32xf32>) -> tensor<?x32xf32> {
  %c = arith.constant 0.0 : f32
  %zero = linalg.fill ins(%c : f32) outs(%e : tensor<?x32xf32>) -> tensor<?x32xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<?x64xf32>, tensor<32x64xf8E4M3FN>) outs(%zero : tensor<?x32xf32>) -> tensor<?x32xf32>
  %z = linalg.generic {indexing_maps = [#mn, #n, #mn], iterator_types = ["parallel", "parallel"]}
      ins(%y, %b : tensor<?x32xf32>, tensor<32xf32>) outs(%e : tensor<?x32xf32>) {
  ^bb0(%a: f32, %d: f32, %o: f32):
    %s = arith.addf %a, %d : f32
    linalg.yield %s : f32
  } -> tensor<?x32xf32>
  return %z : tensor<?x32xf32>
}

// CHECK-LABEL: func.func @two_readers(
// CHECK: %[[Q:.+]]:2 = util.call @block32_quantize_4x64xf32_e4m3_rceil(
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
func.func @two_readers(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>) -> (tensor<4x32xf32>, tensor<4x32xf32>) {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @ws}}
      ins(%x, %w : tensor<4x64xf32>, tensor<32x64xf8E4M3FN>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  %z = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = "dynamic"}, block32.rhs = {block = [32, 32], scale = @vs}}
      ins(%x, %w : tensor<4x64xf32>, tensor<32x64xf8E4M3FN>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y, %z : tensor<4x32xf32>, tensor<4x32xf32>
}

util.func private @to_e5m2(%x: tensor<4x64xf32>) -> (tensor<4x64xf8E5M2>, tensor<4x2xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize", element = "f8E5M2"}, inlining_policy = #util.inline.never} {
  %scales = arith.constant dense<1.0> : tensor<4x2xf8E8M0FNU>
  %codes = arith.truncf %x : tensor<4x64xf32> to tensor<4x64xf8E5M2>
  util.return %codes, %scales : tensor<4x64xf8E5M2>, tensor<4x2xf8E8M0FNU>
}

// CHECK-LABEL: func.func @another_format(
// CHECK: %[[Q:.+]]:2 = util.call @to_e5m2(
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
func.func @another_format(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %q:2 = util.call @to_e5m2(%x) : (tensor<4x64xf32>) -> (tensor<4x64xf8E5M2>, tensor<4x2xf8E8M0FNU>)
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #wb, #y]
      ins(%q#0, %q#1, %w, %ws : tensor<4x64xf8E5M2>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
      outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

util.func private @to_e4m3(%x: tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never} {
  %scales = arith.constant dense<1.0> : tensor<4x2xf8E8M0FNU>
  %codes = arith.truncf %x : tensor<4x64xf32> to tensor<4x64xf8E4M3FN>
  util.return %codes, %scales : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>
}

// Outside a loop around its reader, x is quantised once.
// CHECK-LABEL: func.func @outside_a_loop(
// CHECK: %[[Q:.+]]:2 = util.call @to_e4m3(
// CHECK: scf.for
// CHECK: linalg.scaled_contract {{.*}} ins(%[[Q]]#0, %[[Q]]#1,
func.func @outside_a_loop(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>, %times: index) -> tensor<4x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %q:2 = util.call @to_e4m3(%x) : (tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
  %sum = scf.for %i = %c0 to %times step %c1 iter_args(%s = %zero) -> tensor<4x32xf32> {
    %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #wb, #y]
        ins(%q#0, %q#1, %w, %ws : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>)
        outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
    scf.yield %y : tensor<4x32xf32>
  }
  return %sum : tensor<4x32xf32>
}

// CHECK: remark: Mx32x64_f32_rceil_e4m3_32x32_f32 with bias: cpu {{.*}}; x is quantised (rceil) by the kernel that multiplies it
// CHECK-NOT: x is quantised
