"""What papers print about the cost of their methods, in units of FedAvg's; None where a paper prints nothing."""

from typing import NamedTuple


class PublishedCost(NamedTuple):
    communication: float | None = None
    """Messages of a client and round."""
    computation: float | None = None
    """Of a local step."""
    memory: float | None = None
    """Vectors that a client holds."""


class PaperCosts(NamedTuple):
    source: str
    methods: dict[str, PublishedCost]
    remark: str


PAPER_COSTS: dict[str, PaperCosts] = {
    "fedsam": PaperCosts(
        "FedSAM (ICML 2022) has no table of costs; these are the methods of its Table 1",
        dict.fromkeys(("fedavg", "scaffold", "fedrobust", "fedsam", "fedcm", "mimelite", "mofedsam"), PublishedCost()),
        "Its text (Section 5.2) says only that methods with momentum send more.",
    ),
    "fednsam": PaperCosts(
        "FedNSAM (ACM MM 2025), Table 1",
        {
            "fedsam": PublishedCost(1),
            "mofedsam": PublishedCost(1),
            "fedgamma": PublishedCost(2),
            "fedsmoo": PublishedCost(2),
            "fedlesam": PublishedCost(1),
            "fednsam": PublishedCost(1),
        },
        "Here the update of MoFedSAM and the momentum of FedNSAM are messages too: a client that was absent does "
        "not know them. They go down only, which makes 1.5.",
    ),
    "fedlesam": PaperCosts(
        "FedLESAM (ICML 2024), Table 7; communication of the last four from Table 5, its cost over its rounds",
        {
            "fedavg": PublishedCost(1, 1, 1),
            "fedsam": PublishedCost(1, 2, 1),
            "fedlesam": PublishedCost(1, 1, 2),
            "mofedsam": PublishedCost(2, 2, 2),
            "fedsmoo": PublishedCost(2, 2, 4),
            "fedlesam_d": PublishedCost(2, 1, 4),
            "fedgamma": PublishedCost(2, 2, 3),
            "fedlesam_s": PublishedCost(2, 1, 4),
        },
        "Here MoFedSAM sends its update down only, which makes 1.5. The dual variables of FedLESAM-D stay where they "
        "are: the server adds the clients' updates to its own, and clients receive and hold one vector less. The "
        "paper's computation counts backward passes, which is the same for these methods.",
    ),
    "fedgf": PaperCosts(
        "FedGF (ICML 2024), Table 3, its totals over FedAvg's 2",
        {
            "fedavg": PublishedCost(1),
            "fedsam": PublishedCost(1),
            "mofedsam": PublishedCost(1.5),
            "fedgf": PublishedCost(1.5),
            "fedsmoo": PublishedCost(2),
            "fedgamma": PublishedCost(2),
        },
        "The paper counts as we do.",
    ),
    "fedgmt": PaperCosts(
        "FedGMT (ICML 2025), Table 1",
        {
            "fedsam": PublishedCost(1, 2),
            "fedspeed": PublishedCost(1, 2),
            "fedsmoo": PublishedCost(2, 2),
            "fedlesam": PublishedCost(1, 1),
            "fedgmt": PublishedCost(1.5, 1.33),
            "fedgmt_v2": PublishedCost(1, 1.33),
        },
        "The paper counts as we do.",
    ),
}
