# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""``python -m block32`` is the ``block32`` command."""

import sys

from block32.tools.cli import main

sys.exit(main())
