"""Compiler passes over HLO: decompose collectives that cross islands, bridge them to the engine."""

from jaxhet.compiler.bridge import bridge as bridge
from jaxhet.compiler.collectives import PER_PLATFORM as PER_PLATFORM
from jaxhet.compiler.decompose import decompose as decompose
from jaxhet.compiler.exchange import ExchangeKind as ExchangeKind
from jaxhet.compiler.halves import scope as scope
from jaxhet.compiler.options import GPU_COMPILER_OPTIONS as GPU_COMPILER_OPTIONS
from jaxhet.compiler.options import Job as Job
from jaxhet.compiler.options import Options as Options
from jaxhet.compiler.plan import PROGRAM_ATTRIBUTE as PROGRAM_ATTRIBUTE
from jaxhet.compiler.plan import Plan as Plan
