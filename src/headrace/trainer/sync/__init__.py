"""Publishing weights to the rollout servers: pause, load, version, verify, resume.

```python
publisher = Publisher(SyncConfig(gateway="http://127.0.0.1:8100"))
publisher.check(model.config)
report = publisher.publish(model.state_dict(), 7, Probe(ids, log_probs))
```
"""

from headrace.trainer.sync.config import SyncConfig
from headrace.trainer.sync.http import SyncFailed
from headrace.trainer.sync.publisher import Publisher, SyncReport
from headrace.trainer.sync.weights import Probe

__all__ = ["Publisher", "SyncConfig", "Probe", "SyncReport", "SyncFailed"]
