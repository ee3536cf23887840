# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a gfx950 (MI355X) has, as numbers.

Sources: AMD's "CDNA4 Instruction Set Architecture" and the CDNA4 white paper; LLVM's AMDGPU user
guide for the cache-policy bits and the memory model of gfx942, which gfx950 shares.
"""

from __future__ import annotations

from typing import Final

#: Lanes of a wave.
WAVE_LANES: Final = 64

#: Compute units of an MI355X, and the dies (XCDs, each with its own L2) that they are on.
COMPUTE_UNITS: Final = 256
XCDS: Final = 8

#: SIMDs of a compute unit. A wave stays on one of them.
SIMDS: Final = 4

#: Registers of a lane (VGPR and AGPR together) at one wave a SIMD.
VECTOR_REGISTERS: Final = 512

#: Bytes of LDS that a workgroup may use.
LDS_BYTES: Final = 160 * 1024

#: Clocks from a load to its data, about (no public figure; schedules and estimates only).
MEMORY_CLOCKS: Final = 800

#: Clocks from a read of LDS to its data, about (no public figure; schedules only).
LDS_READ_CLOCKS: Final = 160

#: Bytes that a lane moves with the widest load, store, or load to LDS.
CHUNK_BYTES: Final = 16

#: ``aux`` bits of raw buffer operations: caches that an access goes past.
#: sc1 alone is the scope of the whole device, past the L1 and past another XCD's lines in the L2.
CACHE_DEFAULT: Final = 0
CACHE_DEVICE_SCOPE: Final = 1 << 4

#: Word 3 of a raw buffer descriptor: 32-bit data, offsets in bytes, bounds checked.
BUFFER_FLAGS: Final = 0x27000

#: A byte offset past the end of every buffer that a kernel describes: such a load gives zeros and
#: such a store does nothing. 2^31 as an i32.
OUT_OF_BOUNDS: Final = -(1 << 31)

#: Peak rates, for estimates: HBM bytes a second, MXFP8 FLOP a second.
HBM_BYTES_PER_SECOND: Final = 8.0e12
MXFP8_FLOPS: Final = 5.0e15

#: Peak clock, for estimates: 256 compute units at 8192 FLOP a clock make the rate above.
CLOCKS_PER_SECOND: Final = 2.4e9

#: Bytes that a compute unit gets from its L1 and from its LDS in a clock, for estimates.
L1_BYTES_PER_CLOCK: Final = 64
LDS_BYTES_PER_CLOCK: Final = 256

#: What a second launch adds, for estimates (no public figure).
SECOND_LAUNCH_SECONDS: Final = 2.0e-6

#: Share of the compute units that reach HBM's peak rate, for estimates (no public figure).
UNITS_FOR_FULL_BANDWIDTH: Final = 0.5
