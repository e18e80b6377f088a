"""Collectives, timed and checked: what `jaxhet bench` and the benchmarks of the tree share."""

from jaxhet.bench.cases import Prepared as Prepared
from jaxhet.bench.cases import chained as chained
from jaxhet.bench.cases import forget_operands as forget_operands
from jaxhet.bench.cases import prepare as prepare
from jaxhet.bench.formulas import COLLECTIVES as COLLECTIVES
from jaxhet.bench.formulas import DTYPES as DTYPES
from jaxhet.bench.formulas import Case as Case
from jaxhet.bench.formulas import Timing as Timing
from jaxhet.bench.formulas import busbw_factor as busbw_factor
from jaxhet.bench.formulas import num_elements as num_elements
from jaxhet.bench.formulas import parse_size as parse_size
from jaxhet.bench.formulas import timing as timing
