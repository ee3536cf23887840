# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

"""Scalar instructions: SOP1, SOP2, SOPC, SOPK and SOPP without branches' targets.

Each table maps a mnemonic to its meaning on Python integers.
"""

from __future__ import annotations

from collections.abc import Callable

from block32.tools.gfx950_executor.decoder import Instruction
from block32.tools.gfx950_executor.errors import UninitialisedError, UnknownInstructionError
from block32.tools.gfx950_executor.operands import scalar_source
from block32.tools.gfx950_executor.state import ALL_BITS, EXEC, FULL_EXEC, VCC, Wave

Step = Callable[[Wave], None]
ALL_64 = FULL_EXEC


def signed(value: int, bits: int = 32) -> int:
    """The two's complement reading of an unsigned value."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _bfe(value: int, control: int, bits: int, is_signed: bool) -> int:
    offset, width = control & (bits - 1), control >> 16 & 0x7F
    field = value >> offset & ((1 << width) - 1)
    return signed(field, width) if is_signed and width else field


def _find(value: int, bits: int, wanted: int) -> int:
    for i in range(bits):
        if value >> i & 1 == wanted:
            return i
    return -1


def _leading(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else -1


def _sign_run(value: int, bits: int) -> int:
    other = ~value & ((1 << bits) - 1) if value >> (bits - 1) & 1 else value
    return bits - other.bit_length() if other else -1


def _reverse(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


# ---- results that leave SCC alone, or set it to "result is not zero"

_PLAIN: dict[str, Callable[[int, int], int]] = {
    "s_mul_i32": lambda a, b: a * b,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "s_bfm_b32": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "s_bfm_b64": lambda a, b: ((1 << (a & 63)) - 1) << (b & 63),
    "s_pack_ll_b32_b16": lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
    "s_pack_lh_b32_b16": lambda a, b: a & 0xFFFF | b & 0xFFFF0000,
    "s_pack_hh_b32_b16": lambda a, b: a >> 16 | b & 0xFFFF0000,
}

_NONZERO: dict[str, Callable[[int, int], int]] = {
    "s_and": lambda a, b: a & b,
    "s_or": lambda a, b: a | b,
    "s_xor": lambda a, b: a ^ b,
    "s_andn2": lambda a, b: a & ~b,
    "s_orn2": lambda a, b: a | ~b,
    "s_nand": lambda a, b: ~(a & b),
    "s_nor": lambda a, b: ~(a | b),
    "s_xnor": lambda a, b: ~(a ^ b),
}
_SHIFTS: dict[str, Callable[[int, int], int]] = {
    "s_lshl_b32": lambda a, b: a << (b & 31),
    "s_lshl_b64": lambda a, b: a << (b & 63),
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_lshr_b64": lambda a, b: a >> (b & 63),
    "s_ashr_i32": lambda a, b: signed(a) >> (b & 31),
    "s_ashr_i64": lambda a, b: signed(a, 64) >> (b & 63),
    "s_bfe_u32": lambda a, b: _bfe(a, b, 32, False),
    "s_bfe_i32": lambda a, b: _bfe(a, b, 32, True),
    "s_bfe_u64": lambda a, b: _bfe(a, b, 64, False),
    "s_bfe_i64": lambda a, b: _bfe(a, b, 64, True),
    "s_absdiff_i32": lambda a, b: abs(signed(a) - signed(b)),
}


def _add(a: int, b: int, carry: int) -> tuple[int, int]:
    total = a + b + carry
    return total, total >> 32


def _subtract(a: int, b: int, carry: int) -> tuple[int, int]:
    return a - b - carry, int(a < b + carry)


def _overflow(total: int) -> tuple[int, int]:
    return total, int(not -(1 << 31) <= total < 1 << 31)


# ---- results with their own rule for SCC: (a, b, scc) -> (result, scc)

_WITH_SCC: dict[str, Callable[[int, int, int], tuple[int, int]]] = {
    "s_add_u32": lambda a, b, c: _add(a, b, 0),
    "s_addc_u32": _add,
    "s_sub_u32": lambda a, b, c: _subtract(a, b, 0),
    "s_subb_u32": _subtract,
    "s_add_i32": lambda a, b, c: _overflow(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b, c: _overflow(signed(a) - signed(b)),
    "s_min_i32": lambda a, b, c: (min(signed(a), signed(b)), int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b, c: (max(signed(a), signed(b)), int(signed(a) > signed(b))),
    "s_min_u32": lambda a, b, c: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b, c: (max(a, b), int(a > b)),
    **{
        f"s_lshl{n}_add_u32": lambda a, b, c, n=n: _add((a << n) & ALL_BITS, b, 0)
        for n in (1, 2, 3, 4)
    },
}

# ---- one source; the second of the pair says whether SCC becomes "result is not zero"

_UNARY: dict[str, tuple[Callable[[int], int], bool]] = {
    "s_mov_b32": (lambda a: a, False),
    "s_mov_b64": (lambda a: a, False),
    "s_not_b32": (lambda a: ~a, True),
    "s_not_b64": (lambda a: ~a, True),
    "s_brev_b32": (lambda a: _reverse(a, 32), False),
    "s_brev_b64": (lambda a: _reverse(a, 64), False),
    "s_bcnt0_i32_b32": (lambda a: 32 - a.bit_count(), True),
    "s_bcnt0_i32_b64": (lambda a: 64 - a.bit_count(), True),
    "s_bcnt1_i32_b32": (lambda a: a.bit_count(), True),
    "s_bcnt1_i32_b64": (lambda a: a.bit_count(), True),
    "s_ff0_i32_b32": (lambda a: _find(a, 32, 0), False),
    "s_ff0_i32_b64": (lambda a: _find(a, 64, 0), False),
    "s_ff1_i32_b32": (lambda a: _find(a, 32, 1), False),
    "s_ff1_i32_b64": (lambda a: _find(a, 64, 1), False),
    "s_flbit_i32_b32": (lambda a: _leading(a, 32), False),
    "s_flbit_i32_b64": (lambda a: _leading(a, 64), False),
    "s_flbit_i32": (lambda a: _sign_run(a, 32), False),
    "s_flbit_i32_i64": (lambda a: _sign_run(a, 64), False),
    "s_sext_i32_i8": (lambda a: signed(a & 0xFF, 8), False),
    "s_sext_i32_i16": (lambda a: signed(a & 0xFFFF, 16), False),
    "s_abs_i32": (lambda a: abs(signed(a)), True),
}

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


def _write(wave: Wave, code: int, wide: bool, value: int, poison: int) -> None:
    if wide:
        wave.write_s64(code, value & ALL_64, poison)
    else:
        wave.write_s(code, value, poison)


def _set_scc(wave: Wave, value: int, poison: bool) -> None:
    wave.scc = value
    wave.scc_poison = poison


def _wide(inst: Instruction, name: str) -> bool:
    return inst.width(name) == 2


def _and_poison(a: int, pa: int, b: int, pb: int) -> int:
    return (pa & pb) | (pa & b) | (pb & a)


def _or_poison(a: int, pa: int, b: int, pb: int) -> int:
    return (pa & pb) | (pa & ~b) | (pb & ~a)


def _bitwise_poison(name: str, a: int, pa: int, b: int, pb: int) -> int:
    if name in ("s_and", "s_nand"):
        return _and_poison(a, pa, b, pb)
    if name == "s_andn2":
        return _and_poison(a, pa, ~b, pb)
    if name in ("s_or", "s_nor"):
        return _or_poison(a, pa, b, pb)
    if name == "s_orn2":
        return _or_poison(a, pa, ~b, pb)
    return pa | pb


def compile_salu(inst: Instruction) -> Step:
    """The meaning of a scalar ALU instruction, except branches and program control.

    Raises:
        UnknownInstructionError: There is none.
    """
    if inst.encoding == "SOP1":
        return _compile_sop1(inst)
    if inst.encoding == "SOP2":
        return _compile_sop2(inst)
    if inst.encoding == "SOPC":
        return _compile_sopc(inst)
    if inst.encoding == "SOPK":
        return _compile_sopk(inst)
    raise UnknownInstructionError(inst.name)


def _compile_sop2(inst: Instruction) -> Step:
    name, target, wide = inst.name, inst["sdst"], _wide(inst, "sdst")
    first = scalar_source(inst, "ssrc0", inst.width("ssrc0"))
    second = scalar_source(inst, "ssrc1", inst.width("ssrc1"))
    everything = ALL_64 if wide else ALL_BITS
    stem = name.rsplit("_", 1)[0]
    if stem in _NONZERO and name.endswith(("_b32", "_b64")):
        bitwise = _NONZERO[stem]

        def run_bitwise(wave: Wave) -> None:
            (a, pa), (b, pb) = first(wave), second(wave)
            value = bitwise(a, b) & everything
            poison = _bitwise_poison(stem, a, pa, b, pb) & everything if pa | pb else 0
            _write(wave, target, wide, value, poison)
            _set_scc(wave, int(value != 0), bool(poison) and not value & ~poison)

        return run_bitwise
    if name in ("s_cselect_b32", "s_cselect_b64"):

        def run_select(wave: Wave) -> None:
            (a, pa), (b, pb) = first(wave), second(wave)
            value, poison = (a, pa) if wave.scc else (b, pb)
            _write(wave, target, wide, value, everything if wave.scc_poison else poison)

        return run_select
    if name in _WITH_SCC:
        with_scc = _WITH_SCC[name]
        reads_scc = name in ("s_addc_u32", "s_subb_u32")

        def run_carry(wave: Wave) -> None:
            (a, pa), (b, pb) = first(wave), second(wave)
            value, scc = with_scc(a, b, wave.scc)
            bad = bool(pa | pb) or (reads_scc and wave.scc_poison)
            _write(wave, target, wide, value, everything if bad else 0)
            _set_scc(wave, scc, bad)

        return run_carry
    if name in _PLAIN or name in _SHIFTS:
        plain = _PLAIN.get(name) or _SHIFTS[name]
        sets_scc = name in _SHIFTS

        def run_plain(wave: Wave) -> None:
            (a, pa), (b, pb) = first(wave), second(wave)
            value = plain(a, b) & everything
            bad = bool(pa | pb)
            _write(wave, target, wide, value, everything if bad else 0)
            if sets_scc:
                _set_scc(wave, int(value != 0), bad)

        return run_plain
    raise UnknownInstructionError(name)


def _compile_sop1(inst: Instruction) -> Step:
    name, target, wide = inst.name, inst["sdst"], _wide(inst, "sdst")
    if name == "s_getpc_b64":
        after = inst.pc + inst.size

        def run_getpc(wave: Wave) -> None:
            wave.write_s64(target, wave.workgroup.code_address + after)

        return run_getpc
    source = scalar_source(inst, "ssrc0", inst.width("ssrc0"))
    everything = ALL_64 if wide else ALL_BITS
    if name in _UNARY:
        unary, sets_scc = _UNARY[name]
        moves = name.startswith(("s_mov_", "s_not_"))

        def run_unary(wave: Wave) -> None:
            a, pa = source(wave)
            value = unary(a) & everything
            _write(wave, target, wide, value, pa if moves else (everything if pa else 0))
            if sets_scc:
                _set_scc(wave, int(value != 0), bool(pa))

        return run_unary
    if name.endswith("_saveexec_b64"):
        return _compile_saveexec(name, target, source)
    if name in ("s_bitset0_b32", "s_bitset1_b32"):
        wanted = name == "s_bitset1_b32"

        def run_bitset(wave: Wave) -> None:
            bit, poison = source(wave)
            old = wave.read_s(target)
            value = old | 1 << (bit & 31) if wanted else old & ~(1 << (bit & 31))
            wave.write_s(target, value, ALL_BITS if poison else wave.s_poison[target])

        return run_bitset
    if name in ("s_cmov_b32", "s_cmov_b64"):

        def run_cmov(wave: Wave) -> None:
            if wave.scc_poison:
                raise UninitialisedError("scc is uninitialised")
            if wave.scc:
                value, poison = source(wave)
                _write(wave, target, wide, value, poison)

        return run_cmov
    raise UnknownInstructionError(name)


_SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "and": lambda s, e: s & e,
    "or": lambda s, e: s | e,
    "xor": lambda s, e: s ^ e,
    "andn2": lambda s, e: s & ~e,
    "orn2": lambda s, e: s | ~e,
    "nand": lambda s, e: ~(s & e),
    "nor": lambda s, e: ~(s | e),
    "xnor": lambda s, e: ~(s ^ e),
    "andn1": lambda s, e: ~s & e,
    "orn1": lambda s, e: ~s | e,
}


def _compile_saveexec(name: str, target: int, source: Callable[[Wave], tuple[int, int]]) -> Step:
    kind = name.removeprefix("s_").removesuffix("_saveexec_b64")
    combine = _SAVEEXEC[kind]

    def run(wave: Wave) -> None:
        value, poison = source(wave)
        before = wave.exec_mask
        if kind in ("and", "andn1"):
            poison &= before  # what inactive lanes would have decided does not matter
        wave.write_s64(target, before)
        after = combine(value, before) & ALL_64
        wave.write_s64(EXEC, after, poison)
        _set_scc(wave, int(after != 0), False)

    return run


def _compile_sopc(inst: Instruction) -> Step:
    name = inst.name
    first = scalar_source(inst, "ssrc0", inst.width("ssrc0"))
    second = scalar_source(inst, "ssrc1", inst.width("ssrc1"))
    if name.startswith("s_bitcmp"):
        wanted = int(name.startswith("s_bitcmp1"))
        bits = 63 if name.endswith("b64") else 31
        return _comparison(first, second, lambda a, b: a >> (b & bits) & 1 == wanted)
    _, _, kind, form = name.split("_")
    compare = _COMPARE[kind]
    if form == "i32":
        return _comparison(first, second, lambda a, b: compare(signed(a), signed(b)))
    return _comparison(first, second, compare)


def _comparison(
    first: Callable[[Wave], tuple[int, int]],
    second: Callable[[Wave], tuple[int, int]],
    compare: Callable[[int, int], bool],
) -> Step:
    def run(wave: Wave) -> None:
        (a, pa), (b, pb) = first(wave), second(wave)
        _set_scc(wave, int(compare(a, b)), bool(pa | pb))

    return run


def _compile_sopk(inst: Instruction) -> Step:
    name, target = inst.name, inst["sdst"]
    immediate = signed(inst["simm16"], 16)
    if name == "s_movk_i32":
        return lambda wave: wave.write_s(target, immediate)
    if name == "s_cmovk_i32":

        def run_cmovk(wave: Wave) -> None:
            if wave.scc:
                wave.write_s(target, immediate, ALL_BITS if wave.scc_poison else 0)

        return run_cmovk
    if name.startswith("s_cmpk_"):
        _, _, kind, form = name.split("_")
        compare = _COMPARE[kind]
        constant = immediate if form == "i32" else inst["simm16"]

        def run_compare(wave: Wave) -> None:
            value = wave.read_s(target)
            value = signed(value) if form == "i32" else value
            _set_scc(wave, int(compare(value, constant)), bool(wave.s_poison[target]))

        return run_compare
    if name in ("s_addk_i32", "s_mulk_i32"):

        def run_arith(wave: Wave) -> None:
            value, poison = signed(wave.read_s(target)), wave.s_poison[target]
            total = value + immediate if name == "s_addk_i32" else value * immediate
            wave.write_s(target, total, ALL_BITS if poison else 0)
            if name == "s_addk_i32":
                _set_scc(wave, _overflow(total)[1], bool(poison))

        return run_arith
    if name in ("s_setreg_b32", "s_setreg_imm32_b32"):
        return _compile_setreg(inst)
    raise UnknownInstructionError(name)


_HWREG_MODE = 1
_F32_DENORMALS, _OVERFLOW_CLAMP = 4, 23


def _compile_setreg(inst: Instruction) -> Step:
    """s_setreg of two fields of MODE: f32 denormals (divisions toggle them) and FP16_OVFL."""
    register, offset = inst["simm16"] & 0x3F, inst["simm16"] >> 6 & 0x1F
    size = (inst["simm16"] >> 11 & 0x1F) + 1
    known = ((_F32_DENORMALS, 2), (_F32_DENORMALS, 4), (_OVERFLOW_CLAMP, 1))
    if register != _HWREG_MODE or (offset, size) not in known:
        raise UnknownInstructionError(f"{inst.name} of hardware register {register}, bit {offset}")
    literal, source = inst.literal, inst["sdst"]

    def run(wave: Wave) -> None:
        value = literal if literal is not None else wave.defined_s(source, "a mode")
        if offset == _OVERFLOW_CLAMP:
            wave.clamps_overflow = bool(value & 1)
        else:
            wave.flush_f32 = value & 3 != 3

    return run


_BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not _scc(wave),
    "s_cbranch_scc1": lambda wave: bool(_scc(wave)),
    "s_cbranch_vccz": lambda wave: not _vcc(wave),
    "s_cbranch_vccnz": lambda wave: bool(_vcc(wave)),
    "s_cbranch_execz": lambda wave: wave.exec_mask == 0,
    "s_cbranch_execnz": lambda wave: wave.exec_mask != 0,
}


def _scc(wave: Wave) -> int:
    if wave.scc_poison:
        raise UninitialisedError("the branch depends on an uninitialised value (scc)")
    return wave.scc


def _vcc(wave: Wave) -> int:
    value, poison = wave.read_s64(VCC), wave.poison_s64(VCC)
    if poison and not value & ~poison:
        raise UninitialisedError("the branch depends on an uninitialised value (vcc)")
    return value


_NO_EFFECT = {
    *("s_nop", "s_sleep", "s_setprio", "s_icache_inv", "s_ttracedata", "s_wakeup"),
    *("s_incperflevel", "s_decperflevel"),
}


def compile_program_control(inst: Instruction) -> Step:
    """Branches, waits, the barrier and the end of the program."""
    name, immediate = inst.name, inst["simm16"]
    if name in _BRANCHES:
        taken = _BRANCHES[name]
        target = inst.pc + 4 + 4 * signed(immediate, 16)

        def run_branch(wave: Wave) -> None:
            if taken(wave):
                wave.pc = target

        return run_branch
    if name == "s_waitcnt":
        vm = immediate & 0xF | immediate >> 10 & 0x30
        lgkm = immediate >> 8 & 0xF
        return lambda wave: wave.counters.wait(vm, lgkm)
    if name == "s_barrier":
        return lambda wave: setattr(wave, "at_barrier", True)
    if name == "s_endpgm":
        return lambda wave: setattr(wave, "ended", True)
    if name in _NO_EFFECT:
        return lambda wave: None
    raise UnknownInstructionError(name)
