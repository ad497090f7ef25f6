"""Registers the parts of the pages in docs/extend/."""

import wordrun

wordrun.register("model", "squared", "mine.squared:SquaredConfig", "mine.squared:Squared")
wordrun.register("model", "bigram", "mine.bigram:BigramConfig", "mine.bigram:Bigram")
wordrun.register("data", "sums", "mine.sums:SumsConfig", "mine.sums:Sums")
wordrun.register("model", "mlp", "mine.mlp:MLPConfig", "mine.mlp:MLP")
wordrun.register("data", "table", "mine.table:TableConfig", "mine.table:table")
wordrun.register("model", "regression", "mine.table:RegressionConfig", "mine.table:Regression")
wordrun.register("model", "student", "mine.student:StudentConfig", "mine.student:Student")
wordrun.register("tokenizer", "alphabet", "mine.alphabet:AlphabetConfig", "mine.alphabet:Alphabet")
wordrun.register("tokenizer", "words", "mine.words:WordsConfig", "mine.words:Words")
wordrun.register("optimizer", "rmsprop", "mine.rmsprop:RMSpropConfig", "mine.rmsprop:rmsprop")
wordrun.register("schedule", "stairs", "mine.stairs:StairsConfig", "mine.stairs:stairs")
wordrun.register("metrics", "sure", "mine.sure:SureConfig", "mine.sure:sure")
wordrun.register("metrics", "r2", "wordrun.config:MetricConfig", "mine.r2:R2")
wordrun.register("profiler", "durations", "mine.durations:DurationsConfig", "mine.durations:Durations")
wordrun.register("tracker", "csv", "mine.csv_file:CsvConfig", "mine.csv_file:CsvTracker")
wordrun.register("hooks", "target", "mine.target:TargetConfig", "mine.target:Target")
wordrun.register("backend", "plain", "mine.plain:PlainConfig", "mine.plain:PlainBackend")
