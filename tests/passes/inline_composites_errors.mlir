// RUN: not block32-opt --pass-pipeline='builtin.module(block32-inline-composites)' %s 2>&1 | FileCheck %s

// CHECK: {{.*}}:4:1: error: 'util.func' op is a composite without a kernel; expected a body
util.func private @no_body(%x: tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never}
func.func @f(%x: tensor<2x32xf32>) -> tensor<2x32xf8E4M3FN> {
  %0:2 = util.call @no_body(%x) : (tensor<2x32xf32>) -> (tensor<2x32xf8E4M3FN>, tensor<2x1xf8E8M0FNU>)
  return %0#0 : tensor<2x32xf8E4M3FN>
}
