"""jaxhet: one JAX program over islands of several vendors."""

from jaxhet._errors import DeadlineError as DeadlineError
from jaxhet._errors import DeviceError as DeviceError
from jaxhet._errors import JaxhetError as JaxhetError
from jaxhet._errors import PeerError as PeerError
from jaxhet._errors import PlanMismatchError as PlanMismatchError
from jaxhet._errors import TransportError as TransportError
from jaxhet._errors import UsageError as UsageError
from jaxhet._initialize import initialize as initialize
from jaxhet._initialize import shutdown as shutdown
from jaxhet._islands import Island as Island
from jaxhet._jit import block_until_ready as block_until_ready
from jaxhet._jit import jit as jit
from jaxhet._jit import last_error as last_error
from jaxhet._mesh import make_mesh as make_mesh
from jaxhet._paths import PeerPath as PeerPath
from jaxhet._paths import Refusal as Refusal
from jaxhet._paths import paths as paths
from jaxhet._per_platform import per_platform as per_platform
from jaxhet._plan import LinkTime as LinkTime
from jaxhet._plan import PlannedExchange as PlannedExchange
from jaxhet._plan import PlanReport as PlanReport
from jaxhet._plan import plan as plan
from jaxhet._session import BridgeOptions as BridgeOptions
from jaxhet._session import islands as islands
from jaxhet._session import launch_from_this_thread as launch_from_this_thread
from jaxhet._session import stats as stats
