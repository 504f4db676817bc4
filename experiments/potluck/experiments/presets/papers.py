"""Papers whose experiments are reproduced, and strategies with experiments of their own."""

from __future__ import annotations

from potluck.experiments.presets.preset import UNCHECKED, Preset, because

FEDDIVERSE = Preset(
    name="feddiverse",
    paper="FedDiverse (diversity-driven client selection), CMNIST_GSC",
    run={
        "rounds": 200,
        "count": 9,
        "weighting": "equal",
        "task": {"name": "cmnist", "distribution": "cmnist-gsc"},
        "selector": {"name": "feddiverse"},
        "strategy": {"name": "fedavgm", "momentum": 0.95},
        "training": {"optimizer": "sgd", "learning_rate": 0.001, "batch_size": 28, "epochs": 1},
    },
    assumptions=because(
        selector__cross_product="feddiverse takes the absolute product, which gives the shares of "
        "client types in the paper's figures; Algorithm 5 prints the signed one",
        selector__rotation="feddiverse moves on with the round, as in Algorithm 6; the text says "
        "with every three clients",
        training__optimizer="the paper does not name the clients' optimiser",
        training__epochs="the number of local steps is not stated; one pass over the samples",
        weighting="Algorithm 1 weighs by samples, §5.2 says all clients count the same",
        task__network="MobileNetV2 from ImageNet in the paper; here a small network from scratch",
    ),
)

FEDENTOPT = Preset(
    name="fedentopt",
    paper="FedEntOpt (entropy-based client selection), CIFAR-10 with two labels per client",
    run={
        "rounds": 500,
        "count": 10,
        "task": {"name": "cifar10", "clients": 100, "partition": "labels", "labels": 2},
        "selector": {"name": "fedentopt", "buffer": 70},
        "strategy": {"name": "fedavg"},
        "training": {
            "learning_rate": 0.01,
            "learning_rate_decay": 0.98,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "batch_size": 64,
            "epochs": 5,
        },
    },
    assumptions=because(
        selector__buffer="the figure is missing in the copy we have; 70 % of the clients, as ports "
        "of the code use for two labels",
        training__learning_rate="missing likewise; as ports of the code use",
        training__weight_decay="missing likewise; as ports of the code use",
        task__clients="missing likewise; as ports of the code use",
    ),
)

DC = Preset(
    name="dc",
    paper="Distribution-controlled client selection, MNIST",
    run={
        "rounds": 100,
        "count": 15,
        "task": {
            "name": "mnist",
            "clients": 100,
            "partition": "dirichlet",
            "alpha": 0.1,
            "global_alpha": 2.0,
        },
        "selector": {"name": "dc-balanced", "added": 5},
        "strategy": {"name": "fedavg"},
        "training": {"learning_rate": 0.01, "batch_size": 64, "epochs": 3},
    },
    assumptions=because(
        selector__stop_early="the dc selectors always add all, as Algorithm 1 says, so that "
        "cohorts are of equal size; the text stops when nobody improves the cohort",
        training__learning_rate="not stated; 0.01 as in NIID-Bench",
        training__batch_size="not stated; 64 as in NIID-Bench",
        task__network='"two 5 × 5 convolutions" leaves the widths open',
        task__samples="MNIST's own 60,000 training images instead of a random 80 % of all",
    ),
)

FLASH = Preset(
    name="flash",
    paper="FLASH (simultaneous heterogeneities), CIFAR-10",
    run={
        "rounds": 1500,
        "count": 10,
        "task": {
            "name": "cifar10",
            "clients": 50,
            "partition": "one-class",
            "skewed": 0.3,
            "main": 0.8,
            "label_noise": 0.15,
        },
        "selector": {"name": "flash"},
        "strategy": {"name": "fedavg"},
        "objective": {"name": "noise-robust", "alpha": 1.0, "beta": 1.0},
        "training": {
            "optimizer": "adam",
            "learning_rate": 0.001,
            "batch_size": 64,
            "epochs": 5,
            "validation_share": 0.1,
        },
        "virtual_clock": {"enabled": True},
    },
    disclosure={"questions": ["context"]},
    assumptions=because(
        selector__scale="flash divides durations and rewards by their running means; with seconds "
        "and nats as they are, selection is noise",
        training__learning_rate="not stated",
        training__validation_share="how T_k and V_k are split is not stated",
        training__batch_size="not stated",
        objective__alpha="the captions give pairs (α, β); (1, 1) is that of CIFAR-10",
        objective__beta="as objective.alpha",
        task__noisy_clients="every client's rate is drawn from the same Beta distribution",
        task__network="ResNet-18 in the paper; a small network unless the experiment says so",
    ),
)

FEDCONCAT = Preset(
    name="fedconcat",
    paper="FedConcat (concatenated models of clusters), CIFAR-10",
    run={
        "rounds": 980,
        "count": 10,
        "task": {"name": "cifar10", "clients": 100, "partition": "labels", "labels": 2},
        "model": {
            "name": "concatenation",
            "groups": 5,
            "of": {"name": "lenet5", "classes": 10},
        },
        "selector": {"name": "uniform"},
        "strategy": {"name": "fedconcat", "groups": 5, "rounds": 480},
        "profiles": {"disclosure": "exact"},
        "training": {"learning_rate": 0.01, "batch_size": 64, "epochs": 5},
        "transport": {"up": {"delta": True, "compress": True}},
    },
    disclosure={"exact_label_counts": True},
    assumptions=because(
        count="the traffic that is compared is for one client; ten of a hundred",
        task__partition="one of the skews that are compared",
        training__learning_rate="0.01 as in NIID-Bench",
        training__batch_size="64 as in NIID-Bench",
        training__epochs="the same in both phases; the head is trained for three batches a round",
        transport__up="spares what a client did not train",
    ),
)

FEDDF = Preset(
    name="feddf",
    paper="FedDF (ensemble distillation), CIFAR-10",
    run={
        "rounds": 100,
        "count": 8,
        "task": {
            "name": "cifar10",
            "clients": 20,
            "partition": "dirichlet",
            "alpha": 1.0,
            "public": 5000,
        },
        "selector": {"name": "uniform"},
        "strategy": {
            "name": "feddf",
            "steps": 10_000,
            "batch_size": 128,
            "learning_rate": 0.001,
            "patience": 1000,
            "gradient_clip": 5.0,
        },
        "training": {"learning_rate": 0.1, "batch_size": 64, "epochs": 40},
    },
    assumptions=because(
        count=UNCHECKED,
        task__public="training images without labels; the paper's are CIFAR-100's",
        task__alpha="one of the skews that are compared",
        training__learning_rate=UNCHECKED,
        training__batch_size=UNCHECKED,
        training__epochs=UNCHECKED,
        task__network="LeNet-5; the paper has residual networks",
    ),
)

LORA_STACKING = Preset(
    name="lora-stacking",
    paper="FLoRA (low-rank adapters, stacked), MNIST; all machines need potluck[lora]",
    run={
        "rounds": 3,
        "count": 10,
        "task": {
            "name": "mnist",
            "clients": 10,
            "partition": "uniform",
        },
        "model": {
            "name": "low-rank",
            "rank": 16,
            "scaling": 2.0,
            "of": {
                "name": "perceptron",
                "inputs": 784,
                "hidden": [200],
                "classes": 10,
                "dropout": 0.0,
            },
            "trainable": ["*.lora_?.*", "*.base_layer.*"],
        },
        "selector": {"name": "everyone"},
        "strategy": {"name": "lora-stacking", "scaling": 2.0},
        "training": {
            "optimizer": "adamw",
            "learning_rate": 0.0003,
            "batch_size": 128,
            "epochs": 1,
        },
    },
    assumptions=because(
        rounds="one of the numbers of rounds that are compared: " + UNCHECKED,
        task__name="the paper adapts TinyLlama and LLaMA to instructions in text; the example "
        "language-model adapts a small one",
        task__partition="the paper deals one set of instructions out to the clients unevenly",
        model__rank="the setting with equal ranks: " + UNCHECKED + "; with unequal ones the "
        "authors' program has 64, 32, 16, 16, 8, 8, 4, 4, 4 and 4, for which a trainer of your own "
        "calls keep_rank",
        model__of="the paper's models are trained before, this one begins at random",
        model__trainable="biases travel as well, since no file that all machines have holds them",
        model__scaling="twice the rank as lora_alpha, as in the authors' program",
        strategy__scaling="as model.scaling",
        selector__name="all ten take part, as in the authors' program",
        training__optimizer="the default of the library that the authors' program trains with",
        training__epochs=UNCHECKED,
    ),
)

RHFL_LOGITS = Preset(
    name="rhfl-logits",
    paper="RHFL (robust heterogeneous federated learning) with a model for each client, CIFAR-10",
    run={
        "rounds": 40,
        "count": 4,
        "roster": 4,
        "task": {
            "name": "cifar10",
            "clients": 4,
            "partition": "uniform",
            "public": 5000,
            "label_noise": 0.1,
        },
        "model": {
            "name": "ensemble",
            "members": 4,
            "of": [
                {"name": "resnet10-gn", "classes": 10, "small_images": True},
                {"name": "resnet12-gn", "classes": 10, "small_images": True},
                {"name": "lenet5", "classes": 10},
                {"name": "mobilenetv2-gn", "classes": 10},
            ],
        },
        "selector": {"name": "everyone"},
        "strategy": {
            "name": "rhfl-logits",
            "clients": 4,
            "epochs": 1,
            "batch_size": 256,
            "learning_rate": 0.001,
        },
        "objective": {"name": "symmetric-cross-entropy", "alpha": 0.1, "beta": 1.0},
        "training": {
            "optimizer": "adam",
            "learning_rate": 0.001,
            "batch_size": 256,
            "epochs": 1,
        },
        "round": {"late_joiners": "refuse"},
        "transport": {"up": {"delta": True, "compress": True}},
    },
    assumptions=because(
        task__public="training images without labels; the paper's are CIFAR-100's",
        task__label_noise="one of the two rates that are compared",
        model__of="LeNet-5 where the paper has ShuffleNet; the others are its kinds, with group in "
        "place of batch normalisation",
        strategy__epochs="as in the authors' program",
        strategy__batch_size="as in the authors' program",
        training__epochs=UNCHECKED,
        objective__alpha="as in the authors' program",
        objective__beta="as in the authors' program",
        transport__up="spares what a client did not train",
    ),
)
