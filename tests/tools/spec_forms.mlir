// RUN: block32 spec %s --target=portable --iree-hal-target-device=local \
// RUN:     --iree-hal-local-target-device-backends=llvm-cpu -o %t
// RUN: FileCheck %s < %t
// RUN: iree-opt %t | FileCheck %s --check-prefix=PARSES

// One function a form of the input. `test_spec.py` runs them through both ways in.

#x = affine_map<(m, n, k) -> (m, k)>
#xs = affine_map<(m, n, k) -> (m, k floordiv 32)>
#w = affine_map<(m, n, k) -> (n, k)>
#wt = affine_map<(m, n, k) -> (k, n)>
#ws = affine_map<(m, n, k) -> (n floordiv 32, k floordiv 32)>
#ws1 = affine_map<(m, n, k) -> (n, k floordiv 32)>
#y = affine_map<(m, n, k) -> (m, n)>

#gx = affine_map<(m, n, b, k) -> (m, b, k)>
#gxs = affine_map<(m, n, b, k) -> (m, b)>
#gw = affine_map<(m, n, b, k) -> (n, b, k)>
#gws = affine_map<(m, n, b, k) -> (n, b)>
#gy = affine_map<(m, n, b, k) -> (m, n)>

#sx = affine_map<(m, no, ni, b, k) -> (m, b, k)>
#sxs = affine_map<(m, no, ni, b, k) -> (m, b)>
#sw = affine_map<(m, no, ni, b, k) -> (no, ni, b, k)>
#sws = affine_map<(m, no, ni, b, k) -> (no, b)>
#sy = affine_map<(m, no, ni, b, k) -> (m, no, ni)>

// The command line, and what is named or counted: eleven matmuls of nine kinds, since two of
// @contract_twice are alike, and @layers has one that is like that of @marked.
// CHECK: // Written by block32 for target portable.
// CHECK-NEXT: //   iree-compile {{.*}}spec_forms.mlir --iree-hal-target-device=local
// CHECK-SAME: --iree-preprocessing-transform-spec-filename=
// CHECK-NEXT: // Block-scaled matmuls: 11 (distinct: 9). Made for this model alone.

// Globals are named and not defined.
// CHECK: util.global private @x_scale : tensor<4x2xi8>
// CHECK: util.global private @w_scale : tensor<2x2xi8>
// CHECK-NOT: @unused

// The main sequence finds each kind by what it is.
// CHECK-LABEL: transform.named_sequence @__transform_main
// CHECK: structured.match ops{["linalg.matmul"]} attributes {block32.lhs = {block = [1, 32], scale = @x_scale}
// CHECK: foreach_match restrict_root in
// CHECK-NEXT: @block32_match_0 -> @block32_replace_0
// CHECK-COUNT-8: structured.match
// CHECK-NOT: structured.match

// PARSES: transform.named_sequence @__transform_main

util.global private @x_scale = dense<[[120, 121], [122, 123], [124, 125], [126, 127]]> : tensor<4x2xi8>
util.global private @w_scale = dense<[[128, 119], [126, 131]]> : tensor<2x2xi8>
util.global private @other_scale = dense<[[121, 127], [130, 118]]> : tensor<2x2xi8>
util.global private @unused = dense<7> : tensor<2x2xi8>

func.func @marked(%x: tensor<4x64xf8E4M3FN>, %w: tensor<48x64xf8E4M3FN>) -> tensor<4x48xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x48xf32>
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = @x_scale},
       block32.rhs = {block = [32, 32], scale = @w_scale}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>)
      outs(%zero : tensor<4x48xf32>) -> tensor<4x48xf32>
  return %y : tensor<4x48xf32>
}

func.func @marked_constants(%x: tensor<4x64xf8E4M3FN>, %w: tensor<64x48xf8E4M3FN>) -> tensor<4x48xf32> {
  %cst = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<4x48xf32>
  %zero = linalg.fill ins(%cst : f32) outs(%empty : tensor<4x48xf32>) -> tensor<4x48xf32>
  %y = linalg.matmul
      {block32.lhs = {block = [1, 32], scale = dense<[[120, 121], [122, 123], [124, 125], [126, 127]]> : tensor<4x2xi8>},
       block32.rhs = {block = [32, 32], scale = dense<[[128, 119], [126, 131]]> : tensor<2x2xi8>}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<64x48xf8E4M3FN>)
      outs(%zero : tensor<4x48xf32>) -> tensor<4x48xf32>
  return %y : tensor<4x48xf32>
}

func.func @marked_init(%x: tensor<4x64xf8E4M3FN>, %w: tensor<48x64xf8E4M3FN>, %init: tensor<4x48xf32>) -> tensor<4x48xf32> {
  %y = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = @x_scale},
       block32.rhs = {block = [32, 32], scale = @w_scale}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>)
      outs(%init : tensor<4x48xf32>) -> tensor<4x48xf32>
  return %y : tensor<4x48xf32>
}

// Two layers of one shape, each with its own scales, over the same weight.
func.func @layers(%x: tensor<4x64xf8E4M3FN>, %w: tensor<48x64xf8E4M3FN>) -> tensor<4x48xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x48xf32>
  %y0 = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = @x_scale},
       block32.rhs = {block = [32, 32], scale = @w_scale}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>)
      outs(%zero : tensor<4x48xf32>) -> tensor<4x48xf32>
  %y1 = linalg.matmul indexing_maps = [#x, #w, #y]
      {block32.lhs = {block = [1, 32], scale = @x_scale},
       block32.rhs = {block = [32, 32], scale = @other_scale}}
      ins(%x, %w : tensor<4x64xf8E4M3FN>, tensor<48x64xf8E4M3FN>)
      outs(%zero : tensor<4x48xf32>) -> tensor<4x48xf32>
  %difference = arith.subf %y0, %y1 : tensor<4x48xf32>
  return %difference : tensor<4x48xf32>
}

func.func @contract_twice(%x: tensor<?x64xf8E4M3FN>, %w: tensor<48x64xf8E4M3FN>,
    %xs: tensor<?x2xf8E8M0FNU>, %ws: tensor<2x2xf8E8M0FNU>,
    %w2: tensor<48x64xf8E4M3FN>) -> tensor<?x48xf32> {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x64xf8E4M3FN>
  %cst = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?x48xf32>
  %zero = linalg.fill ins(%cst : f32) outs(%empty : tensor<?x48xf32>) -> tensor<?x48xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
      ins(%x, %xs, %w, %ws : tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>, tensor<48x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>)
      outs(%zero : tensor<?x48xf32>) -> tensor<?x48xf32>
  %y2 = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws, #y]
      ins(%x, %xs, %w2, %ws : tensor<?x64xf8E4M3FN>, tensor<?x2xf8E8M0FNU>, tensor<48x64xf8E4M3FN>, tensor<2x2xf8E8M0FNU>)
      outs(%zero : tensor<?x48xf32>) -> tensor<?x48xf32>
  %difference = arith.subf %y, %y2 : tensor<?x48xf32>
  return %difference : tensor<?x48xf32>
}

// B as (k, n), a scale a row of B, K no multiple of 32, and a bf16 result on an init.
func.func @contract_transposed(%x: tensor<3x72xf8E5M2>, %w: tensor<72x40xf8E4M3FN>,
    %xs: tensor<3x3xf8E8M0FNU>, %ws: tensor<40x3xf8E8M0FNU>,
    %init: tensor<3x40xbf16>) -> tensor<3x40xbf16> {
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #wt, #ws1, #y]
      ins(%x, %xs, %w, %ws : tensor<3x72xf8E5M2>, tensor<3x3xf8E8M0FNU>, tensor<72x40xf8E4M3FN>, tensor<40x3xf8E8M0FNU>)
      outs(%init : tensor<3x40xbf16>) -> tensor<3x40xbf16>
  return %y : tensor<3x40xbf16>
}

func.func @contract_with_itself(%x: tensor<4x64xf8E4M3FN>, %xs: tensor<4x2xf8E8M0FNU>) -> tensor<4x4xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x4xf32>
  %y = linalg.scaled_contract indexing_maps = [#x, #xs, #w, #ws1, #y]
      ins(%x, %xs, %x, %xs : tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<4x64xf8E4M3FN>, tensor<4x2xf8E8M0FNU>)
      outs(%zero : tensor<4x4xf32>) -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}

func.func @generic_swapped(%x: tensor<?x2x32xf8E4M3FN>, %w: tensor<48x2x32xf8E4M3FN>,
    %xs: tensor<?x2xf8E8M0FNU>, %ws: tensor<48x2xf8E8M0FNU>) -> tensor<?x48xf32> {
  %c0 = arith.constant 0 : index
  %m = tensor.dim %x, %c0 : tensor<?x2x32xf8E4M3FN>
  %cst = arith.constant 0.0 : f32
  %empty = tensor.empty(%m) : tensor<?x48xf32>
  %zero = linalg.fill ins(%cst : f32) outs(%empty : tensor<?x48xf32>) -> tensor<?x48xf32>
  %y = linalg.generic {indexing_maps = [#gw, #gx, #gws, #gxs, #gy],
      iterator_types = ["parallel", "parallel", "reduction", "reduction"]}
      ins(%w, %x, %ws, %xs : tensor<48x2x32xf8E4M3FN>, tensor<?x2x32xf8E4M3FN>, tensor<48x2xf8E8M0FNU>, tensor<?x2xf8E8M0FNU>)
      outs(%zero : tensor<?x48xf32>) {
  ^bb0(%b: f8E4M3FN, %a: f8E4M3FN, %bs: f8E8M0FNU, %as: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %a, %as : f8E4M3FN, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %2, %acc : f32
    linalg.yield %3 : f32
  } -> tensor<?x48xf32>
  return %y : tensor<?x48xf32>
}

func.func @generic_split(%x: tensor<4x2x32xf8E4M3FN>, %w: tensor<2x32x2x32xf8E4M3FN>,
    %xs: tensor<4x2xf8E8M0FNU>, %ws: tensor<2x2xf8E8M0FNU>) -> tensor<4x2x32xf32> {
  %zero = arith.constant dense<0.0> : tensor<4x2x32xf32>
  %y = linalg.generic {indexing_maps = [#sx, #sw, #sxs, #sws, #sy],
      iterator_types = ["parallel", "parallel", "parallel", "reduction", "reduction"]}
      ins(%x, %w, %xs, %ws : tensor<4x2x32xf8E4M3FN>, tensor<2x32x2x32xf8E4M3FN>, tensor<4x2xf8E8M0FNU>, tensor<2x2xf8E8M0FNU>)
      outs(%zero : tensor<4x2x32xf32>) {
  ^bb0(%a: f8E4M3FN, %b: f8E4M3FN, %as: f8E8M0FNU, %bs: f8E8M0FNU, %acc: f32):
    %0 = arith.scaling_extf %a, %as : f8E4M3FN, f8E8M0FNU to f32
    %1 = arith.scaling_extf %b, %bs : f8E4M3FN, f8E8M0FNU to f32
    %2 = arith.mulf %0, %1 : f32
    %3 = arith.addf %acc, %2 : f32
    linalg.yield %3 : f32
  } -> tensor<4x2x32xf32>
  return %y : tensor<4x2x32xf32>
}
