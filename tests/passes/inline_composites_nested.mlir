// RUN: block32-opt --pass-pipeline='builtin.module(block32-inline-composites)' %s | FileCheck %s

// A composite whose meaning another composite says, defined after it and called twice.
// CHECK-NOT: util.call
// CHECK-LABEL: func.func @f
// CHECK-SAME: %[[X:.+]]: tensor<2x32xf32>
// CHECK: arith.negf %[[X]]
// CHECK: arith.truncf
// CHECK: arith.negf
// CHECK: arith.truncf
// CHECK-NOT: util.call
util.func private @outer(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never} {
  %negated = arith.negf %x : tensor<2x32xf32>
  %0:2 = util.call @inner(%negated) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  util.return %0#0, %0#1 : tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>
}
func.func @f(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x32xf8E4M3FN>) {
  %0:2 = util.call @outer(%x) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  %1:2 = util.call @outer(%x) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  return %0#0, %1#0 : tensor<2x32xf8E4M3FN>, tensor<2x32xf8E4M3FN>
}
util.func private @inner(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never} {
  %codes = arith.truncf %x : tensor<2x32xf32> to tensor<2x32xf8E4M3FN>
  %scales = arith.constant dense<1.0> : tensor<2x1xf8E8M0FNU>
  util.return %codes, %scales : tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>
}
