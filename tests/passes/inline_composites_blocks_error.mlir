// RUN: not block32-opt --pass-pipeline='builtin.module(block32-inline-composites)' %s 2>&1 | FileCheck %s

// CHECK: {{.*}}:4:1: error: 'util.func' op is a composite of 2 blocks; expected one
util.func private @blocks(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never} {
  cf.br ^bb1
^bb1:
  %codes = arith.truncf %x : tensor<2x32xf32> to tensor<2x32xf8E4M3FN>
  %scales = arith.constant dense<1.0> : tensor<2x1xf8E8M0FNU>
  util.return %codes, %scales : tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>
}
func.func @f(%x: tensor<2x32xf32>) -> tensor<2x32xf8E4M3FN> {
  %0:2 = util.call @blocks(%x) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  return %0#0 : tensor<2x32xf8E4M3FN>
}
