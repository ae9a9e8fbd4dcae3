"""How often one step's weights are pushed: every retry of a push, in one place.

Retries nest, so their product counts. From the outside in:

    REQUESTS    answers were lost: servers are waited for, get the weights again, and are asked again
      ATTEMPTS  a push failed: servers are waited for, and it is repeated
        changes a push failed, and another way is left: it is repeated at once, that way, for the rest of the run
          opens a server was restarted since its last push: a new group is formed, and its update is opened again
      PROOFS    a proof is in doubt: it is repeated

Each change is made once in a run, so changes add to the product and do not multiply it: from adapters to full weights,
from merges at the servers to merges at the learner, or (where no adapter trains) from one group of all servers to one
for each. How many pushes and how many seconds that makes at most is in docs/semantics.md (section 12), and
tests/unit/trainer/sync/test_retries.py counts it.
"""

REQUESTS = 3
"""Tries of a request for rollouts before lost servers end the run. Each but the first begins with a push."""
ATTEMPTS = 3
"""Tries of a push before lost servers end the run. A wait in vain for servers is one, too."""
PROOFS = 2
"""Tries of one proof before a doubt stays; the push stands, and the next one is proved."""
ANSWER_GRACE_S = 5.0
"""For a server to report itself why its link broke."""
