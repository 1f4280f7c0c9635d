#include "config/resolver.h"

#include <gtest/gtest.h>

#include "../error_of.h"
#include "config/nearest.h"
#include "config/render.h"

namespace ds::config {
namespace {

Config resolved(const std::string& text, const Options& options = {}) {
  return resolve(read_text(text, "f"), schema(Root::kTraining), options);
}

std::vector<std::string> codes(const Config& config, Severity severity) {
  std::vector<std::string> out;
  for (const Issue& issue : config.issues()) {
    if (issue.severity == severity) out.push_back(issue.code);
  }
  return out;
}

using Words = std::vector<std::string>;

TEST(Resolver, EmptyIsAllDefaults) {
  const Config config = resolved("{}");
  EXPECT_FALSE(config.broken());
  EXPECT_EQ(
      config.values(),
      section_defaults(schema(Root::kTraining).root)
          .patch(Value::array({{{"op", "replace"}, {"path", "/zero_optimization/overlap_comm"}, {"value", false}}})));
  EXPECT_EQ(non_default(config, schema(Root::kTraining)), "");
}

TEST(Resolver, OriginsKnowLines) {
  const Config config = resolved("{\"zero_optimization\":\n{\"prefetch_bucket_size\": 7}}");
  const Origin origin = config.origin("zero_optimization.stage3_prefetch_bucket_size");
  EXPECT_EQ(origin.source, Source::kGiven);
  EXPECT_EQ(origin.line, 2);
  EXPECT_EQ(config.where("zero_optimization.stage3_prefetch_bucket_size"),
            "zero_optimization.stage3_prefetch_bucket_size (line 2)");
  EXPECT_EQ(config.origin("steps_per_print").source, Source::kDefault);
}

TEST(Resolver, UnknownKeys) {
  EXPECT_EQ(codes(resolved("{\"fp16\": {\"x\": 1}}"), Severity::kError), Words{"unknown_key"});
  EXPECT_EQ(codes(resolved("{\"qqqqqqqq\": 1}"), Severity::kWarning), Words{"unknown_key"});
  EXPECT_EQ(codes(resolved("{\"fp17\": {}}"), Severity::kError), Words{"unknown_key"});  // two edits at most
  Options strict;
  strict.strict_top_level = true;
  EXPECT_EQ(codes(resolved("{\"qqqqqqqq\": 1}", strict), Severity::kError), Words{"unknown_key"});
  EXPECT_FALSE(resolved("{\"msamp\": {}}", strict).broken());  // known to be another's
  EXPECT_EQ(codes(resolved("{\"aio\": {\"thread_count\": 1}}"), Severity::kWarning), Words{"ignored_key"});
  EXPECT_EQ(resolved("{\"pipeline\": {\"use_reentrant\": true}}").values()["pipeline"]["use_reentrant"], true);
}

TEST(Resolver, AutoCountsAsAbsentInValidatedSectionsOnly) {
  const Config config = resolved("{\"zero_optimization\": {\"reduce_bucket_size\": \"auto\"}, \"fp16\": \"auto\"}");
  EXPECT_EQ(config.values()["zero_optimization"]["reduce_bucket_size"], 500000000);
  EXPECT_EQ(config.origin("zero_optimization.reduce_bucket_size").source, Source::kAuto);
  EXPECT_EQ(codes(config, Severity::kNote), Words{"auto"});
  EXPECT_EQ(codes(config, Severity::kError), Words{"wrong_type"});  // fp16 stands in the top level
}

TEST(Resolver, DeprecatedNamesForwardOnce) {
  const Config config = resolved("{\"zero_optimization\": {\"stage\": 2, \"cpu_offload\": true}}");
  EXPECT_EQ(config.values()["zero_optimization"]["offload_optimizer"]["device"], "cpu");
  EXPECT_EQ(config.origin("zero_optimization.offload_optimizer").source, Source::kDeprecated);
  EXPECT_EQ(codes(config, Severity::kWarning), Words{"deprecated"});
  EXPECT_TRUE(resolved("{\"zero_optimization\": {\"cpu_offload\": false}}")
                  .values()["zero_optimization"]["offload_optimizer"]
                  .is_null());
}

TEST(Resolver, NotBuiltIsRefusedWhenSwitchedOn) {
  EXPECT_FALSE(resolved("{\"amp\": {\"enabled\": false, \"opt_level\": \"O1\"}}").broken());
  EXPECT_EQ(codes(resolved("{\"amp\": {\"enabled\": true}}"), Severity::kError), Words{"not_built"});
  EXPECT_TRUE(codes(resolved("{\"gradient_allreduce_op\": \"SUM\"}"), Severity::kError).empty());
  EXPECT_FALSE(resolved("{\"sequence_parallel_size\": 1}").broken());
  EXPECT_FALSE(resolved("{\"sequence_parallel_size\": 2}").broken());
  const Config config = resolved("{\"hybrid_engine\": {\"enabled\": true}}");
  EXPECT_NE(config.complaint(), "");
  EXPECT_EQ(config.complaint(nullptr, false), "");
}

TEST(Resolver, SectionsByThemselvesSkipRulesOfTheWhole) {
  Options part;
  part.sections_only = true;
  const char* text = "{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"cpu\"}}}";
  EXPECT_EQ(resolved(text, part).complaint(nullptr, false), "");
  EXPECT_NE(resolved(text).complaint(nullptr, false), "");
}

TEST(Resolver, ComplaintKindIsAssertionIfAnyIs) {
  ErrorKind kind = ErrorKind::kConfig;
  EXPECT_NE(resolved("{\"zero_optimization\": {\"stage\": 4, \"x\": 1}}").complaint(&kind), "");
  EXPECT_EQ(kind, ErrorKind::kAssertion);
}

TEST(Resolver, AVariableOverridesItsKey) {
  const std::string path = "zero_optimization.audit_steps";
  Options options;
  options.environment["DS_AUDIT"] = "0";
  const char* text = "{\"zero_optimization\": {\"audit_steps\": 3}}";
  EXPECT_EQ(*resolved(text).find(path), 3);
  const Config off = resolved(text, options);
  EXPECT_FALSE(off.broken());
  EXPECT_EQ(*off.find(path), 0);
  EXPECT_EQ(off.origin(path).source, Source::kEnvironment);
  EXPECT_EQ(off.origin(path).detail, "DS_AUDIT");

  options.environment["DS_AUDIT"] = "2";
  const Config on = resolved("{}", options);
  EXPECT_EQ(*on.find(path), 2);
  EXPECT_TRUE(says(explain(on, schema(Root::kTraining)), "environment: DS_AUDIT"));
  options.environment["DS_AUDIT"] = "two";
  EXPECT_EQ(codes(resolved("{}", options), Severity::kError), Words{"environment"});
  options.environment["DS_AUDIT"] = "";
  EXPECT_FALSE(resolved("{}", options).broken());
  options.environment["DS_AUDIT"] = "2";
  options.sections_only = true;
  EXPECT_FALSE(resolved("{}", options).broken());
}

TEST(Resolver, NumbersInQuotesAreReadInValidatedSectionsWithAWarning) {
  const auto read = [](const std::string& key, const std::string& text) {
    return resolved("{\"zero_optimization\": {\"stage\": \"2\", \"" + key + "\": \"" + text + "\"}}");
  };
  for (const char* text : {"5", " 5 ", "5.0", "+5", "0_5", "5.00"}) {
    const Config config = read("reduce_bucket_size", text);
    EXPECT_FALSE(config.broken()) << text << " " << config.complaint();
    EXPECT_EQ(config.values()["zero_optimization"]["reduce_bucket_size"], 5) << text;
    EXPECT_EQ(config.values()["zero_optimization"]["stage"], 2);
    EXPECT_EQ(codes(config, Severity::kWarning), (Words{"read_as", "read_as"}));
  }
  for (const char* text : {"", "x", "5.5", "5e8", "0x10", "5.", "_5", "5_", "-1", "nan"})
    EXPECT_TRUE(read("reduce_bucket_size", text).broken()) << text;
  const Config scale = resolved("{\"fp16\": {\"enabled\": \"1\", \"loss_scale\": \"1.28e2\"}}");
  EXPECT_EQ(scale.values()["fp16"]["loss_scale"], 128.0);
  EXPECT_EQ(scale.values()["fp16"]["enabled"], true);
  EXPECT_TRUE(resolved("{\"gradient_clipping\": \"1.0\"}").broken());  // the top level is not pydantic's
}

TEST(Resolver, BothNamesOfADeprecatedKeyAreAnAssertion) {
  ErrorKind kind = ErrorKind::kConfig;
  const Config config = resolved("{\"zero_optimization\": {\"cpu_offload\": true, \"offload_optimizer\": {}}}");
  EXPECT_TRUE(says(config.complaint(&kind), "deprecated name"));
  EXPECT_EQ(kind, ErrorKind::kAssertion);
}

TEST(Resolver, AnAliasThatYieldsIsIgnoredBesideItsName) {
  for (const char* text : {"{\"bf16\": {}, \"bfloat16\": {\"enabled\": true, \"x\": 1}}",
                           "{\"bfloat16\": {\"enabled\": true, \"x\": 1}, \"bf16\": {}}"}) {
    const Config config = resolved(text);
    EXPECT_FALSE(config.broken());
    EXPECT_EQ(codes(config, Severity::kWarning), Words{"two_spellings"});
    EXPECT_EQ(config.values()["bf16"]["enabled"], false);
  }
  EXPECT_EQ(resolved("{\"bfloat16\": {\"enabled\": true}}").values()["bf16"]["enabled"], true);
}

TEST(Resolver, ListsDropCopiesAndNullStandsForTheDefault) {
  const Config config = resolved(
      "{\"zero_optimization\": {\"leaf_module\": {\"names\": [\"a\", \"b\", \"a\"], "
      "\"classes\": null, \"name_suffixes\": \"x\"}}}");
  EXPECT_FALSE(config.broken());
  const Value& leaf = config.values()["zero_optimization"]["leaf_module"];
  EXPECT_EQ(leaf["names"], Value::array({"a", "b"}));
  EXPECT_EQ(leaf["classes"].size(), 3u);
  EXPECT_EQ(leaf["name_suffixes"], Value::array({"x"}));
}

TEST(Resolver, OtherNamesLimitOpenChoices) {
  Options options;
  options.other_names["optimizer.type"] = {"SGD"};
  EXPECT_FALSE(resolved("{\"optimizer\": {\"type\": \"SGD\"}}", options).broken());
  EXPECT_TRUE(resolved("{\"optimizer\": {\"type\": \"Sgd\"}}", options).broken());
  EXPECT_FALSE(resolved("{\"optimizer\": {\"type\": \"Sgd\"}}").broken());
}

TEST(Nearest, FindsSlips) {
  EXPECT_EQ(edit_distance("fp16", "fp61"), 1);  // a swap is one edit
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("Adam", "adam"), 0);
  EXPECT_EQ(nearest("stge", {"stage", "device"}), "stage");
  EXPECT_EQ(nearest("warmup_steps", {"warmup_type", "warmup_num_steps"}), "warmup_num_steps");
  EXPECT_EQ(nearest("clipping", {"steps", "gradient_clipping"}), "gradient_clipping");
  EXPECT_EQ(nearest("qqqqqqqqq", {"stage", "device"}), "");
  EXPECT_GE(edit_distance(std::string(100000, 'a'), "stage"), 99000);  // and fast
}

TEST(Render, DocsNameEveryKeyAndSchemaIsJson) {
  const std::string text = docs();
  for (const char* part :
       {"## ZeRO", "### `fp16`", "`offload_optimizer.pipeline_read`", "Rules between keys", "*Deprecated: use"}) {
    EXPECT_TRUE(says(text, part)) << part;
  }
  EXPECT_NO_THROW(Value::parse(json_schema(schema(Root::kTraining))));
}

TEST(Render, ExplainShowsEveryParameterOfAnOptimizer) {
  const char* text =
      "{\"optimizer\": {\"type\": \"Adam\",\n\"params\": {\n\"lr\": 1e-3,\n\"weight_decay\": 0}},\n"
      "\"scheduler\": {\"type\": \"StepLR\", \"params\": {\n\"step_size\": 3}}}";
  const std::string out = non_default(resolved(text), schema(Root::kTraining));
  EXPECT_TRUE(says(out, "optimizer.params.lr = 0.001 (line 3)\n"));
  EXPECT_TRUE(says(out, "optimizer.params.weight_decay = 0 (line 4)\n"));
  EXPECT_TRUE(says(out, "scheduler.params.step_size = 3 (line 6)"));  // a class of torch
}

TEST(Render, ExplainShowsOriginsAndConflicts) {
  const Config config = resolved(
      "{\"zero_optimization\":\n{\"stage\": 1, \"reduce_bucket_size\": \"auto\"},\n\"fp16\": {\"enabled\": true}, "
      "\"bf16\": {\"enabled\": true}}");
  const std::string text = explain(config, schema(Root::kTraining));
  for (const char* part : {"zero_optimization.stage", "line 2", "default, \"auto\" on line 2", "Conflicts",
                           "known, not built yet: DeepCompile", "derived: zero_optimization.stage = 1"}) {
    EXPECT_TRUE(says(text, part)) << part;
  }
}

}  // namespace
}  // namespace ds::config
