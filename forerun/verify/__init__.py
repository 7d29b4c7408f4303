"""Verification rules: which part of a draft the target accepts.

A rule takes drafts, the scores after each node and one `Noise` per request, and returns one
`Verdict` per request. All rules but `typical` (`lossy`) preserve the target's output.
"""

from forerun.verify import block, match, token, tree, typical
from forerun.verify.base import Noise, Rule, ratio
from forerun.verify.match import streams

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("match", match.verify, coupled=True, branching=True, follow=match.follow_all),
        Rule("token", ratio(token.verify_chain)),
        Rule("block", ratio(block.verify_chain)),
        Rule("tree", ratio(tree.verify_tree), branching=True),
        Rule("typical", typical.verify, coupled=True, branching=True, lossy=True),
    )
}

__all__ = ["RULES", "Noise", "Rule", "streams"]
