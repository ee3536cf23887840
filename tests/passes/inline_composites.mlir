// RUN: block32-opt --pass-pipeline='builtin.module(block32-inline-composites)' %s | FileCheck %s
// RUN: block32-opt --pass-pipeline='builtin.module(block32-inline-composites)' %s | FileCheck %s --check-prefix=GONE

// A composite is known by its attribute: a function of the same form without it stays a call.
// GONE-NOT: block32.composite
// GONE-NOT: @never_called
util.func private @looks_the_same(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>) {
  %codes = arith.truncf %x : tensor<2x32xf32> to tensor<2x32xf8E4M3FN>
  %scales = arith.constant dense<1.0> : tensor<2x1xf8E8M0FNU>
  util.return %codes, %scales : tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>
}
util.func private @composite(%x: tensor<?x32xf32>) -> (tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never} {
  %c0 = arith.constant 0 : index
  %rows = tensor.dim %x, %c0 : tensor<?x32xf32>
  %codes = arith.truncf %x : tensor<?x32xf32> to tensor<?x32xf8E4M3FN>
  %scales = tensor.generate %rows {
  ^bb0(%i: index, %j: index):
    %code = tensor.extract %codes[%i, %j] : tensor<?x32xf8E4M3FN>
    %byte = arith.bitcast %code : f8E4M3FN to i8
    %scale = arith.bitcast %byte : i8 to f8E8M0FNU
    tensor.yield %scale : f8E8M0FNU
  } : tensor<?x1xf8E8M0FNU>
  util.return %codes, %scales : tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>
}
util.func private @never_called(%x: tensor<?x32xf32>) -> (tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never}

// Two calls give two copies, each of its own operands; ops inside regions are reached, too.
// CHECK-LABEL: func.func @twice(
// CHECK-SAME: %[[A:.+]]: tensor<?x32xf32>, %[[B:.+]]: tensor<?x32xf32>)
// CHECK: tensor.dim %[[A]]
// CHECK: %[[ACODES:.+]] = arith.truncf %[[A]]
// CHECK: %[[ASCALES:.+]] = tensor.generate
// CHECK: tensor.extract %[[ACODES]]
// CHECK: tensor.dim %[[B]]
// CHECK: %[[BCODES:.+]] = arith.truncf %[[B]]
// CHECK: tensor.generate
// CHECK: tensor.extract %[[BCODES]]
// CHECK: return %[[ASCALES]], %[[BCODES]]
func.func @twice(%a: tensor<?x32xf32>, %b: tensor<?x32xf32>) -> (tensor<?x1xf8E8M0FNU>, tensor<?x32xf8E4M3FN>) {
  %0:2 = util.call @composite(%a) : (tensor<?x32xf32>) -> (tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>)
  %1:2 = util.call @composite(%b) : (tensor<?x32xf32>) -> (tensor<?x32xf8E4M3FN>, tensor<?x1xf8E8M0FNU>)
  return %0#1, %1#0 : tensor<?x1xf8E8M0FNU>, tensor<?x32xf8E4M3FN>
}

// CHECK-LABEL: func.func @ordinary
// CHECK: util.call @looks_the_same
func.func @ordinary(%x: tensor<2x32xf32>) -> tensor<2x32xf8E4M3FN> {
  %0:2 = util.call @looks_the_same(%x) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  return %0#0 : tensor<2x32xf8E4M3FN>
}
