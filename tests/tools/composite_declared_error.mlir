// RUN: not block32 compile %s --target=cpu -o %t.vmfb 2>&1 | FileCheck %s
// RUN: not block32 spec %s --target=cpu -o %t.mlir 2>&1 | FileCheck %s

// A composite without a body: IREE's phase abi makes an import of it, of other types.

// CHECK: {{.*}}:8:1: error: 'util.func' op is a composite that is declared only, which iree-compile takes for an import; expected a body that says what it computes
// CHECK-NOT: malformed
util.func private @declared(%x: tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
    attributes {block32.composite = {kind = "quantize"}, inlining_policy = #util.inline.never}
func.func @f(%x: tensor<4x64xf32>) -> tensor<4x64xf8E4M3FN> {
  %codes, %scales = util.call @declared(%x) : (tensor<4x64xf32>) -> (tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
  return %codes : tensor<4x64xf8E4M3FN>
}
