"""Verification rules: which part of a draft the target accepts.

A rule takes drafts, the scores after each node and one `Noise` per request, and returns one
`Verdict` per request. All rules but `typical` (`lossy`) preserve the target's output.
"""

from forerun.verify import match
from forerun.verify.base import Noise, Rule
from forerun.verify.match import streams, verify_typical
from forerun.verify.ratio import ratio_rule, verify_block, verify_token, verify_tree

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("match", match.verify, coupled=True, branching=True, follow=match.follow_all),
        Rule("token", ratio_rule(verify_token)),
        Rule("block", ratio_rule(verify_block)),
        Rule("tree", ratio_rule(verify_tree), branching=True),
        Rule("typical", verify_typical, coupled=True, branching=True, lossy=True),
    )
}

__all__ = ["RULES", "Noise", "Rule", "streams"]
