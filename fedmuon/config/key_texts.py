"""What every key of a config is, in one sentence or two: what `fedmuon config explain` says, and
docs/config.md has.

Defaults, types and limits are in `fedmuon.config.schema`, readers in `fedmuon.config.read_if`.
"""

KEYS: dict[str, dict[str, str]] = {
    "data": {
        "name": "the source of samples; `fedmuon doctor` says which are here",
        "train": "n, the samples that are dealt to the clients",
        "test": "samples held out, for test loss and accuracy",
        "alpha": "Dirichlet concentration of the labels over clients: small is uneven, inf even",
        "minimum": (
            "samples that every client has at least: dirichlet and quantity fill small clients "
            "up from the largest, other partitions that give fewer are refused; lowered for few "
            "samples of yours"
        ),
        "normalize": (
            "how each sample is scaled, by itself: unit divides it by its norm, ball where that "
            "exceeds 1; pixels divides arrays of uint8 by 255; tokens leaves all alone; auto is "
            "tokens for text, else unit for the matrix task and pixels for networks"
        ),
        "folder": (
            "where a source's files are, if not in its usual place; the file of npz, csv, parquet"
        ),
        "context": "tokens that a window of text sees",
        "tokenizer": "a folder with GPT-2's tokenizer; empty reads bytes",
        "dimension": "features of a made up sample",
        "classes": "labels of the samples that are made up",
    },
    "federation": {
        "clients": "N, how many there are",
        "per-round": "K, drawn afresh each round; fewer clients than 5 take part all",
        "rounds": "R, how many there are",
        "risk-weights": (
            "weights p_i of the clients in the train loss that is reported and bounded: n_i / "
            "n, or 1 / N; the server's average is `aggregate`'s"
        ),
        "aggregate": (
            "what the server makes of a round's models and states; bounds are of mean and "
            "by-samples, as is the correction of …-muonbc"
        ),
        "partition": "who holds which sample",
        "seed": "the seed of every draw but secret noise",
    },
    "task": {
        "name": (
            "the controlled task of 001, whose constants are proved, or the cross-entropy of a "
            "network"
        ),
        "model": "the module",
        "width": "entries of the decoder's vectors",
        "depth": "blocks of the decoder",
        "heads": "heads of its attention",
        "initial": "X⁰: entries of variance 1/d, or 0, from where bounds are tighter",
        "weights": "a .safetensors file, or a folder of them, to start from",
        "lora-rank": (
            "r of adapters (LoRA) of the projections to queries, keys and values, which alone "
            "are learned, beside `weights`, which stay and are taken for public; a run that "
            "goes on wants the same. 0 learns all. For Muon to take all adapters, set "
            '`local.route = "all-matrices"`'
        ),
    },
    "local": {
        "recipe": "the steps of a client, and what the server does with their average",
        "steps": "E, local steps a round",
        "batch": "samples of a step; 0 is the full batch",
        "lr": "η, the step size",
        "momentum": "β, the memory of the momentum",
        "momentum-form": "βM + (1 − β)G (001) or βM + G (000, 002), with a look ahead or without",
        "weight-decay": "decoupled: X is also stepped by −lr · decay · X",
        "schedule": "what lr is times in each round; heavy-tailed sets lr and momentum by 002",
        "tail-index": "α of 002, the tail of the noise; 0 if unknown",
        "alignment": (
            "α of 001, Remark 3.2: a step is (1 − α) Orth(M) + α times the last global direction"
        ),
        "server-momentum": "β of the server",
        "route": (
            "a network's parameters to orthogonalize: its matrices without first and last "
            "layer, embeddings and norms, or all matrices; `routes.txt` says which"
        ),
        "aux": (
            "the step of all other parameters: −aux-lr · M, or AdamW's, begun afresh each round "
            "by federated recipes"
        ),
        "aux-lr": (
            "its step size; 0 is 0.05 for sgd and 0.001 for adamw, which the resolved config says"
        ),
        "adjust": (
            "scale of an orthogonalized [m, n] step: 1, √max(1, m/n) or 0.2 √max(m, n), as in "
            "torch.optim.Muon"
        ),
    },
    "orthogonalizer": {
        "name": "the map",
        "lambda": "λ: σ becomes σ / √(σ² + λ); the Lipschitz constant is 1 / √λ",
        "steps": "q, polynomial steps",
        "coefficients": "the polynomials",
        "eps": "ε of the normalization",
        "normalization": (
            "what M is divided by first: ‖M‖ + ε (001), max(‖M‖, ε) (torch), max(‖M‖, 1) (000)"
        ),
        "sigma": "σ, the smoothing noise",
        "clip-level": "γ, below which singular values are scaled",
        "rank": "r of the sketch",
        "oversample": "columns of the sketch beside the rank",
        "power": "h, power iterations",
        "sketch": "how the sketch is drawn",
    },
    "privacy": {
        "clipping": (
            "each example's gradient is clipped in every matrix block, in one norm, or scaled "
            "to the bound"
        ),
        "bound": (
            "C, that bound; inf clips nothing; at client level that of a client's whole update"
        ),
        "quantile": (
            "the share of gradients that shall not be clipped: C follows it, from `bound`, by "
            "noisy counts that `noise` accounts for; 0 keeps C"
        ),
        "quantile-rate": (
            "how much ln C moves, for a share that is off by 1; C stays between 10⁻¹⁵ and 10¹⁵"
        ),
        "count-noise": (
            "noise of a lot's count of gradients not clipped; 0 is the larger of lot / 20 and "
            "`noise`"
        ),
        "noise": (
            "σ, the noise multiplier: each entry of a lot's mean has noise of σC / lot; at "
            "client level a round's sum has noise of σC"
        ),
        "lot": "samples of a Poisson lot, on average, or of one that takes its turn",
        "epsilon": "ε to spend: finds `noise` if that is 0, and the resolved config says it",
        "delta": (
            "δ of the account; 0 is n^−1.1 and 10⁻⁵ at most, n the samples of the largest client "
            "or the public `population`, at client level the number of clients"
        ),
        "level": (
            "who is protected: single examples within a client, or clients whole, of recipes "
            "that average their models (and momenta)"
        ),
        "trust": (
            "who adds a client's noise: the server; each client all of it; or each a share of it, "
            "of which, and of the updates, the server learns the sum alone, by masks that cancel "
            "(needs cohorts fixed; off `inline`, [faults] policy strict and retries 0)"
        ),
        "honest": (
            "the part of a cohort that neither withholds its shares of the noise nor tells them to "
            "the server: H = ⌊`honest` · K⌋ shares of K count, one's own at least, and ε is that "
            "of σ √(H / K)"
        ),
        "state-weight": (
            "w of (X_k − X, w (M_k − M)), a client's update: how much of the bound momenta "
            "take; noise in them is σC / w"
        ),
        "cohorts": (
            "who takes part: each client with per-round / clients, which amplifies and is "
            "secret, or per-round of them, which may be known"
        ),
        "adjacency": (
            "what ε compares: a sample adds 0 instead, is there or not, or is another; "
            "add-remove holds with a public `population` or `rate`, and is the default there"
        ),
        "sampling": (
            "a sample is in each lot by chance, or the lots of an epoch, cut from an order that "
            "is drawn anew for each (shuffle) or once (cyclic), take turns; these are accounted "
            "for without amplification"
        ),
        "noise-correlation": (
            "DP-FTRL: a step's noise takes back part of that of the steps before, so that sums "
            "have less; one client, one process, no resuming, as past noise is kept in memory "
            "alone"
        ),
        "band": (
            "how many steps that is, itself one of them: so many models, less one, are kept; "
            "best about the lots of an epoch"
        ),
        "population": (
            "a public number of samples of a client, for rates lot / population; 0 takes each "
            "client's own"
        ),
        "rate": (
            "a public chance of every sample; sums are over `lot` all the same; 0 is lot / "
            "population"
        ),
        "kappa": "κ, gain of the filter (003)",
        "lookahead": "γ of 003, how far ahead the filter looks",
        "probes": "antithetic pairs of the bias correction (000)",
        "noise-source": (
            "lots and noise from a key stream (AES-256 in counter mode, a key of the system's "
            "entropy for every step), or from NumPy's PCG64 seeded by the system, which "
            "certifies nothing"
        ),
        "arithmetic": (
            "noise in floating point, or exact discrete Gaussian noise on sums of a lattice, "
            "whose low bits tell nothing; auto is grid for secret noise, continuous for "
            "repeatable noise, correlated noise and bounds that follow a quantile; distributed "
            "trust has integers always"
        ),
        "insecure-reproducible-noise": (
            "noise and lots from the run's seed, for tests: protects nobody"
        ),
    },
    "engine": {
        "name": "this process, Ray's workers, or a SuperLink and SuperNodes",
        "dtype": "precision of everything; `fedmuon stability` takes float64 if none is named",
        "device": "auto is cuda where there is one",
        "kernel": (
            "matrix products; fused has thin ones compiled (numba); auto takes that for long "
            "runs, else measures which library is fastest here"
        ),
        "cpus-per-client": (
            "CPUs of a worker, and threads that it computes with (1 at least); there are as many "
            "workers as fit"
        ),
        "gpus-per-client": "GPUs of a worker; a fraction shares one",
        "ray-address": "a running cluster; empty starts a local Ray",
    },
    "faults": {
        "policy": (
            "ask again and then stop, resumable; or average over those who answered, without a "
            "bound"
        ),
        "retries": "how often a participant is asked again",
        "deadline": "seconds for one attempt",
        "patience": "seconds for all nodes to appear at first",
    },
    "stability": {
        "trials": "how many neighbours",
        "neighbours": (
            "the replacement is drawn like the client's own samples or like anybody's; the "
            "`trials` worst of all samples times up to 2,048 held-out replacements, ranked by "
            "derivatives and run exactly beside as many drawn ones (`predicted.csv`); or each "
            "sample once, the census"
        ),
        "delta": "δ, with which probability the bound may fail",
        "lipschitz": "which constant of the map: the proved one, or the printed one",
        "constants": (
            "of the task: the suprema on the ball around X⁰ that the iterates cannot leave, by "
            "step; or those over all models, as 001 has them. Bounds without a run but from X⁰ "
            "= 0, of alignment, of weight decay, of a map of yours, with an Lg of yours are "
            "global"
        ),
        "realized": (
            "`realized.csv`: how far each neighbour can be from this very run, by the run's own "
            "gradients and curvature"
        ),
        "c-hp": (
            "C_hp of Theorem 4.1: two proved forms, or a number that you answer for (then H and "
            "G have δ/2 each, as printed; else all of δ)"
        ),
        "alpha-smoothing": "with which probability smoothing may clip (001, Corollary D.11)",
    },
    "output": {
        "evaluate-every": (
            "rounds between two looks at train and test loss; the last round is always looked "
            "at, and `client_loss` is of every round"
        ),
        "checkpoint-every": "rounds between two checkpoints",
        "callback": "who is told of every round",
    },
}
