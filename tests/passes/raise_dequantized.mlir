// RUN: block32-opt --pass-pipeline='builtin.module(block32-raise)' %s -o %t 2>&1 | FileCheck %s --check-prefix=SILENT --allow-empty
// RUN: cat %t | FileCheck %s

// What a program dequantises before a matmul is found through reshapes, transposes and broadcasts.
// SILENT-NOT: warning

#nk = affine_map<(n, k) -> (n, k)>
#blocks = affine_map<(n, k) -> (n floordiv 32, k floordiv 32)>
#rows = affine_map<(n, k) -> (n, k floordiv 32)>
#bmk = affine_map<(b, m, k) -> (b, m, k)>
#mk = affine_map<(b, m, k) -> (m, k)>

// Both operands: a matmul of fp8 values, on what is stored.
// CHECK-LABEL: func.func @both
// CHECK-SAME: (%[[X:.+]]: tensor<4x64xf8E4M3FN>, %[[XS:.+]]: tensor<4x2xf8E8M0FNU>, %[[W:.+]]: tensor<32x64xf8E4M3FN>, %[[WS:.+]]: tensor<1x2xf8E8M0FNU>)
// CHECK: linalg.scaled_contract
// CHECK-SAME: ins(%[[X]], %[[XS]], %[[W]], %[[WS]] :
// CHECK-NOT: linalg.matmul
func.func @both(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %ex = tensor.empty() : tensor<4x64xbf16>
  %dx = linalg.generic {indexing_maps = [#nk, #rows, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%x, %xs : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>) outs(%ex : tensor<4x64xbf16>) {
  ^bb0(%code: f8E4M3FN, %scale: f8E8M0FNU, %out: bf16):
    %0 = arith.scaling_extf %code, %scale : f8E4M3FN, f8E8M0FNU to bf16
    linalg.yield %0 : bf16
  } -> tensor<4x64xbf16>
  %ew = tensor.empty() : tensor<32x64xbf16>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xf8E8M0FNU>) outs(%ew : tensor<32x64xbf16>) {
  ^bb0(%code: f8E4M3FN, %scale: f8E8M0FNU, %out: bf16):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.extf %scale : f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.truncf %2 : f32 to bf16
    linalg.yield %3 : bf16
  } -> tensor<32x64xbf16>
  %et = tensor.empty() : tensor<64x32xbf16>
  %t = linalg.transpose ins(%dw : tensor<32x64xbf16>) outs(%et : tensor<64x32xbf16>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%dx, %t : tensor<4x64xbf16>, tensor<64x32xbf16>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// An f32 scale is no power of two by itself: the matmul stays.
// CHECK-LABEL: func.func @float_scales
// CHECK: linalg.matmul
func.func @float_scales(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xf32>) -> tensor<4x32xf32> {
  %ew = tensor.empty() : tensor<32x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xf32>) outs(%ew : tensor<32x64xf32>) {
  ^bb0(%code: f8E4M3FN, %scale: f32, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.mulf %0, %scale : f32
    linalg.yield %1 : f32
  } -> tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%dw : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// Attention multiplies two activations.
// CHECK-LABEL: func.func @attention
// CHECK: linalg.batch_matmul
func.func @attention(%q: tensor<12x?x32xf32>, %k: tensor<12x32x?xf32>, %zero: tensor<12x?x?xf32>) -> tensor<12x?x?xf32> {
  %y = linalg.batch_matmul ins(%q, %k : tensor<12x?x32xf32>, tensor<12x32x?xf32>) outs(%zero : tensor<12x?x?xf32>) -> tensor<12x?x?xf32>
  return %y : tensor<12x?x?xf32>
}

// f32 scales are E8M0 bytes where they are constants and powers of two: 2^-2 is 125.
// CHECK-LABEL: func.func @constant_scales
// CHECK-SAME: (%[[X:.+]]: tensor<4x64xf32>, %[[W:.+]]: tensor<32x64xf8E4M3FN>)
// CHECK: %[[BYTES:.+]] = arith.constant dense<{{\[\[}}125, 127{{\]\]}}> : tensor<1x2xi8>
// CHECK: %[[SCALES:.+]] = flow.tensor.bitcast %[[BYTES]] : tensor<1x2xi8> -> tensor<1x2xf8E8M0FNU>
// CHECK: util.call @{{.+}}(%[[X]], %[[W]], %[[SCALES]])
// CHECK-NOT: linalg.matmul
func.func @constant_scales(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>) -> tensor<4x32xf32> {
  %ws = arith.constant dense<[[0.25, 1.0]]> : tensor<1x2xf32>
  %ew = tensor.empty() : tensor<32x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xf32>) outs(%ew : tensor<32x64xf32>) {
  ^bb0(%code: f8E4M3FN, %scale: f32, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.mulf %0, %scale : f32
    linalg.yield %1 : f32
  } -> tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%dw : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// E8M0 written out: two to the power of an unsigned byte less 127.
// CHECK-LABEL: func.func @exponents
// CHECK-SAME: (%[[X:.+]]: tensor<4x64xf32>, %[[W:.+]]: tensor<32x64xf8E4M3FN>, %[[S:.+]]: tensor<1x2xi8>)
// CHECK: %[[SCALES:.+]] = flow.tensor.bitcast %[[S]] : tensor<1x2xi8> -> tensor<1x2xf8E8M0FNU>
// CHECK: util.call @{{.+}}(%[[X]], %[[W]], %[[SCALES]])
// CHECK-NOT: linalg.matmul
func.func @exponents(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xi8>) -> tensor<4x32xf32> {
  %two = arith.constant 2.0 : f32
  %bias = arith.constant 127 : i32
  %ew = tensor.empty() : tensor<32x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xi8>) outs(%ew : tensor<32x64xf32>) {
  ^bb0(%code: f8E4M3FN, %byte: i8, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.extui %byte : i8 to i32
    %2 = arith.subi %1, %bias : i32
    %3 = arith.sitofp %2 : i32 to f32
    %4 = math.powf %two, %3 : f32
    %5 = arith.mulf %0, %4 : f32
    linalg.yield %5 : f32
  } -> tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%dw : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// A signed byte, or another bias, is no E8M0.
// CHECK-LABEL: func.func @signed_exponents
// CHECK: linalg.matmul
func.func @signed_exponents(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xi8>) -> tensor<4x32xf32> {
  %bias = arith.constant 127.0 : f32
  %ew = tensor.empty() : tensor<32x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xi8>) outs(%ew : tensor<32x64xf32>) {
  ^bb0(%code: f8E4M3FN, %byte: i8, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.sitofp %byte : i8 to f32
    %2 = arith.subf %1, %bias : f32
    %3 = math.exp2 %2 : f32
    %4 = arith.mulf %0, %3 : f32
    linalg.yield %4 : f32
  } -> tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%dw : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// CHECK-LABEL: func.func @no_bias
// CHECK: linalg.matmul
func.func @no_bias(%x: tensor<4x64xf32>, %w: tensor<32x64xf8E4M3FN>, %ws: tensor<1x2xi8>) -> tensor<4x32xf32> {
  %bias = arith.constant 126.0 : f32
  %ew = tensor.empty() : tensor<32x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<32x64xf8E4M3FN>, tensor<1x2xi8>) outs(%ew : tensor<32x64xf32>) {
  ^bb0(%code: f8E4M3FN, %byte: i8, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.uitofp %byte : i8 to f32
    %2 = arith.subf %1, %bias : f32
    %3 = math.exp2 %2 : f32
    %4 = arith.mulf %0, %3 : f32
    linalg.yield %4 : f32
  } -> tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%dw : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}

// Scales that are repeated and then cut off at N = 40 are those of the weight.
// CHECK-LABEL: func.func @ragged
// CHECK-SAME: (%[[X:.+]]: tensor<4x64xf32>, %[[W:.+]]: tensor<40x64xf8E4M3FN>, %[[S:.+]]: tensor<2x2xf8E8M0FNU>)
// CHECK: util.call @{{.+}}(%[[X]], %[[W]], %[[S]])
// CHECK-NOT: linalg.matmul
func.func @ragged(%x: tensor<4x64xf32>, %w: tensor<40x64xf8E4M3FN>, %ws: tensor<2x2xf8E8M0FNU>) -> tensor<4x40xf32> {
  %es = tensor.empty() : tensor<64x64xf32>
  %wide = linalg.generic {indexing_maps = [#blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%ws : tensor<2x2xf8E8M0FNU>) outs(%es : tensor<64x64xf32>) {
  ^bb0(%scale: f8E8M0FNU, %out: f32):
    %0 = arith.extf %scale : f8E8M0FNU to f32
    linalg.yield %0 : f32
  } -> tensor<64x64xf32>
  %cut = tensor.extract_slice %wide[0, 0] [40, 64] [1, 1] : tensor<64x64xf32> to tensor<40x64xf32>
  %ew = tensor.empty() : tensor<40x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #nk, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %cut : tensor<40x64xf8E4M3FN>, tensor<40x64xf32>) outs(%ew : tensor<40x64xf32>) {
  ^bb0(%code: f8E4M3FN, %scale: f32, %out: f32):
    %0 = arith.extf %code : f8E4M3FN to f32
    %1 = arith.mulf %0, %scale : f32
    linalg.yield %1 : f32
  } -> tensor<40x64xf32>
  %et = tensor.empty() : tensor<64x40xf32>
  %t = linalg.transpose ins(%dw : tensor<40x64xf32>) outs(%et : tensor<64x40xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x40xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x40xf32>) outs(%zero : tensor<4x40xf32>) -> tensor<4x40xf32>
  return %y : tensor<4x40xf32>
}

// The first rows of a larger weight are another tensor than the weight.
// CHECK-LABEL: func.func @part_of_a_weight
// CHECK: linalg.matmul
func.func @part_of_a_weight(%x: tensor<4x64xf32>, %w: tensor<96x64xf8E4M3FN>, %ws: tensor<3x2xf8E8M0FNU>) -> tensor<4x32xf32> {
  %ew = tensor.empty() : tensor<96x64xf32>
  %dw = linalg.generic {indexing_maps = [#nk, #blocks, #nk], iterator_types = ["parallel", "parallel"]}
      ins(%w, %ws : tensor<96x64xf8E4M3FN>, tensor<3x2xf8E8M0FNU>) outs(%ew : tensor<96x64xf32>) {
  ^bb0(%code: f8E4M3FN, %scale: f8E8M0FNU, %out: f32):
    %0 = arith.scaling_extf %code, %scale : f8E4M3FN, f8E8M0FNU to f32
    linalg.yield %0 : f32
  } -> tensor<96x64xf32>
  %part = tensor.extract_slice %dw[0, 0] [32, 64] [1, 1] : tensor<96x64xf32> to tensor<32x64xf32>
  %et = tensor.empty() : tensor<64x32xf32>
  %t = linalg.transpose ins(%part : tensor<32x64xf32>) outs(%et : tensor<64x32xf32>) permutation = [1, 0]
  %zero = arith.constant dense<0.0> : tensor<4x32xf32>
  %y = linalg.matmul ins(%x, %t : tensor<4x64xf32>, tensor<64x32xf32>) outs(%zero : tensor<4x32xf32>) -> tensor<4x32xf32>
  return %y : tensor<4x32xf32>
}
