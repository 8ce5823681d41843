from glasshouse.errors import GlasshouseError as GlasshouseError
from glasshouse.jobs.api import Fetched as Fetched
from glasshouse.jobs.api import Inspected as Inspected
from glasshouse.jobs.api import RunResult as RunResult
from glasshouse.jobs.api import Sealed as Sealed
from glasshouse.jobs.api import Verified as Verified
from glasshouse.jobs.api import fetch as fetch
from glasshouse.jobs.api import inspect as inspect
from glasshouse.jobs.api import resume as resume
from glasshouse.jobs.api import run as run
from glasshouse.jobs.api import seal as seal
from glasshouse.jobs.api import verify as verify

__version__: str
