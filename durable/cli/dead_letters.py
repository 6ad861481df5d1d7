"""dead-letters: what failed for good, and what becomes of it. A database is enough, but for a rehearsal.

groups · list · show          look
replay · discard · edit       resolve, in batches; the first Ctrl-C ends a run after its batch
"""

from __future__ import annotations
