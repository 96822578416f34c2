"""Words of the page, explained in a sentence or two: shown on hover and on focus."""

from collections.abc import Mapping

TERMS: Mapping[str, str] = {
    "dp": "Data parallelism: each replica of the model trains on other sequences, and gradients are summed.",
    "tp": "Tensor parallelism, with sequence parallelism: every matrix is split over the group's ranks, which exchange "
    "activations in each layer. It wants the fast links of a node.",
    "pp": "Pipeline parallelism: the layers are split into stages. Micro-batches flow through them; at the ends of a "
    "step, pipeline ranks wait (the bubble).",
    "cp": "Context parallelism: each sequence is split over ranks, which share keys and values in attention.",
    "ep": "Expert parallelism: the experts of a layer are split over ranks of dp·cp, and tokens travel to them: "
    "each copy to its expert, or each token once to all of these ranks, which add up what their experts make of it.",
    "micro-batch": "The sequences that a rank takes through forward and backward at a time. A step has several; their "
    "gradients accumulate.",
    "ZeRO": "Ranks that hold the same parameters share the work of keeping them: stage 1 splits optimizer states, 2 "
    "gradients too, 3 parameters too, which are then gathered for each use.",
    "recompute": "Results of forward are dropped and computed again in backward: less memory, more time.",
    "offload": "What is not needed soon is kept in the host's memory, and copied back in time.",
    "parameters": "The weights that matrix products read, in the dtype of compute.",
    "gradients": "Sums of gradients over the micro-batches of a step.",
    "optimizer": "Master weights and moments, which the update reads and writes.",
    "activations": "What forward keeps for backward (for each micro-batch in flight), and temporary results.",
    "other": "Input data, buffers of parameters that ZeRO gathers, and the workspace of kernels.",
    "in flight": "Micro-batches whose forward is done and whose backward is not: their activations are kept.",
    "arena": "One block of memory in which registers have planned addresses, the same in every step.",
    "MFU": "Model FLOPs utilisation: the share of the GPU's dense peak that the model's own products use, with full "
    "attention and without recomputation.",
    "predicted": "Memory is counted tensor by tensor from the program that training runs. Time is that of a simulated "
    "step, with measured rates.",
    "lanes": "A step of each pipeline rank, mid-run, as the simulated clock has it: every pass of a micro-batch, every "
    "wait, and what runs beside compute. Passes of data, tensor and context ranks are alike.",
    "Bubble": "The part of a step in which a rank has nothing to compute, as others of the pipeline are not done: of "
    "the rank that ends last, and of the whole step. The lanes may show fewer micro-batches, and then have more of it.",
    "Exposed communication": "Waits for collectives and copies that no compute hides, of the whole step.",
    "Most in flight": "Micro-batches whose forward is done and whose backward is not: their activations are kept. With "
    "several chunks a rank, each chunk counts.",
    "points": "Layouts that the search has priced. It looks at all, and prices those that could be among the best: the "
    "others are slower by a lower bound. The front is searched for step by step, each with a tenth less memory.",
    "simulated": "The step was simulated: its time is the planner's.",
    "bound": "Priced, not simulated: a lower bound of its time is above the best, so it is slower than drawn.",
    "front": "The fastest simulated layout with so much memory, or less.",
    "mesh": "Ranks are numbered along the mesh: tensor ranks are neighbours, then context, data, and pipeline ranks. A "
    "node has consecutive ranks, so what is close in the mesh has the fast links.",
    "traffic": "Bytes by the price: the output of a gather, the input of other collectives, a message. Seconds: each "
    "call on its own, by the rates of the simulated clock, whether compute hides it or not.",
    "holders": "A parameter is cut along axes of the mesh. Ranks that no cut tells apart hold the same part, and sum "
    "their gradients of it; ZeRO shares out its optimizer states among them.",
    "runs": "The folders of runs that the explorer was started with (--runs). It reads them, and no other folder.",
    "curves": "A field of metrics.jsonl over the steps. Of many steps, each point is the last of its part.",
    "sweeps": "Cases that penteract bench ran, from the folder that the explorer was started with (--sweeps), or a CSV "
    "or JSON that you open. It reads that folder, and no other.",
    "heat": "Each cell has the best of its cases: what others of it reach is in the table of all cases. Colours are "
    "those of viridis: lighter is more, also without colours.",
    "ranking": "Cases by measured tokens a second and GPU. The plan's number is its place by predicted speed among the "
    "same cases; a case within noise of the best counts as the best.",
    "residuals": "Measured less predicted, over measured: +10% is a tenth more than predicted. Cases whose speed "
    "counts for nothing are left out.",
    "scatter": "The front has the cases of which no other is better in both numbers: more speed, less memory or time.",
    "cases": "Each case as its files say. The head of a column sorts by it; the CSV has all cases, as plain numbers.",
    "proven": "A proven checkpoint was read back from the disk, and a finite step was trained after it.",
    "profiles": "What penteract profile leaves of a run's step. Read are the folders that the explorer was started "
    "with (--profiles, --runs) and files that are opened or dropped here; nothing leaves this machine.",
    "measured step": "The median of the steady steps without a profiler, each as long as on the rank that took "
    "longest.",
    "profile waterfall": "Each change begins where the one before it ends: from the ideal step to the predicted one "
    "to the measured one, in whole picoseconds, so that all add up. A part beyond its prediction is where time went.",
    "profile lanes": "One step: above as the simulated clock has it, below as the rank ran it. Strips below a bar "
    "are what runs beside compute. Both carry the same names, so an op is found in both.",
    "ops": "All calls of an op in a step are one row, under the name that prediction and measurement share. Its "
    "ceiling is what this device reached right after the step, in products or in copies, whichever holds it.",
    "unmatched": "What only one side has: kernels that no op of the plan launched, or ops that were not measured.",
    "kernels": "What ran in an op: on a GPU kernels as CUPTI calls them, on a CPU operators of torch. The longest "
    "eight.",
    "skew": "Each rank's mean profiled step. Work is its own kernels and the gaps between them; the rest it waits, "
    "for collectives or other pipeline ranks. One rank that works longer makes all others wait.",
    "owners": "Here each tensor has memory of its own, to see its owner; nothing measured is taken from the plan. A "
    "run puts all into one planned block, with gaps: it takes more than the sum of what lives at one moment.",
    "alive at the peak": "The activations that are alive at the fullest moment of the step, by the op that made them.",
    "fullest rank": "The pipeline rank that allocates most: if it fits, all do.",
}
