// A key of the configuration changes the engine's options, or Python reads it (keys_read_in_python.h), or its feature
// is not built, or it says that it has no effect. Nothing else is accepted, and who says so must be right.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <sstream>

#include "../error_of.h"
#include "../io/folder.h"
#include "config/render.h"
#include "config/resolver.h"
#include "config/schema.h"
#include "keys_read_in_python.h"
#include "zero/engine_options.h"

namespace ds::zero {
namespace {

using config::Field;
using config::Value;

struct Key {
  std::string path;
  const Field* field;
};

// Keys that are there and are not sections; those of optimizers and schedules are arguments of their classes.
void collect(const std::vector<Field>& fields, const std::string& path, const std::string& outer,
             std::vector<Key>& out) {
  for (const Field& field : fields) {
    const std::string here = path.empty() ? field.name : path + "." + field.name;
    const std::string pending = config::pending_feature(field, outer);
    if (field.is_wildcard() || !pending.empty()) continue;
    if (field.is_section()) {
      collect(field.fields, here, pending, out);
    } else {
      out.push_back({here, &field});
    }
  }
}

std::string told(const storage::Placement& p) {
  std::ostringstream out;
  out << int(p.rest) << int(p.work) << p.pinned << ' ' << p.host_share << ' ' << p.file_share << ' ' << p.folder;
  return out.str();
}

// All that an engine is built with, except what the facts of a run are.
std::string told(const EngineOptions& o) {
  std::ostringstream out;
  const auto dtype = [](const c10::optional<at::ScalarType>& type) { return type ? int(*type) : -1; };
  out << o.policy.stage << ' ' << o.threads << ' ' << dtype(o.grad_dtype) << " places " << told(o.placements.master)
      << ' ' << told(o.placements.grad) << ' ' << told(o.placements.slot) << ' ' << told(o.placements.lp);
  if (o.memory) {
    const TierBytes& m = *o.memory;
    out << " memory " << m.device << ' ' << m.host << ' ' << m.file << ' ' << m.folder << ' ' << m.pinned << ' '
        << m.accumulation;
  }
  out << " params " << o.param_offload.host_numel << ' ' << o.param_offload.buffers << ' '
      << o.param_offload.buffer_numel << " swapping " << o.swapping.bucket_numel << ' ' << o.swapping.buffer_count
      << ' ' << o.swapping.leaving_rows << ' ' << o.swapping.reads_ahead << o.swapping.writes_behind
      << o.swapping.own_folder << o.swapping.fast_init;
  const io::TransferOptions& t = o.files.transfers;
  out << " files " << t.block_bytes << ' ' << t.queue_depth << ' ' << t.single_submit << t.overlap_events << ' '
      << o.files.threads << (o.files.cufile != nullptr) << " reducer " << o.reducer.bucket_numel << ' '
      << o.reducer.overlap << o.reducer.scatter << ' ' << o.reducer.predivide << ' ' << o.reducer.postscale << ' '
      << dtype(o.reducer.comm_dtype) << o.reducer.find_nonfinite_grads << o.reducer.blocks << o.reducer.block_errors
      << ' ' << o.reducer.block_error_beta << ' ' << o.reducer.block_reset_steps << " gather " << o.gather.overlap
      << o.gather.collective << ' ' << o.allgather_bucket_numel << " gatherer " << o.gatherer.max_live_numel << ' '
      << o.gatherer.max_reuse_numel << ' ' << o.gatherer.persistence_numel << ' ' << o.gatherer.model_persistence_numel
      << ' ' << o.gatherer.prefetch_numel << o.codes_weights << o.codes_frozen << " strategy " << o.strategy << ' '
      << o.step.threads;
  const ZenFlowOptions& z = o.step.zenflow;
  out << ' ' << z.topk_ratio << ' ' << int(z.select) << ' ' << z.select_interval << ' ' << z.update_interval << ' '
      << z.overlap << z.offload << ' ' << z.auto_ratio << ' ' << z.warm_up << ' ' << z.steps_per_epoch;
  return out.str();
}

// "" where the configuration or the machine refuses it: aio.use_gds without cuFile says so.
std::string options_with(const Value& root) {
  config::Options how;
  const config::Config config =
      config::resolve(config::from_value(root, "test"), config::schema(config::Root::kTraining), how);
  if (config.broken()) return "";
  RunFacts facts;
  facts.threads = 10;
  facts.ranks = 2;
  try {
    return told(engine_options(config, facts));
  } catch (const Error& error) {
    return error.what();
  }
}

Value at_path(Value root, const std::string& path, const Value& value) {
  Value* at = &root;
  for (size_t start = 0; start <= path.size();) {
    const size_t end = std::min(path.find('.', start), path.size());
    if (!at->is_null() && !at->is_object()) return root;  // a bare boolean for the section
    at = &(*at)[path.substr(start, end - start)];
    start = end + 1;
  }
  *at = value;
  return root;
}

// Situations in which some key or other matters.
std::vector<Value> situations(const std::string& folder) {
  const auto zero = [&](const std::string& keys, const std::string& more = "") {
    std::string text = R"({"zero_optimization": {)" + keys + "}" + (more.empty() ? "" : ", " + more) + "}";
    for (size_t at; (at = text.find("FOLDER")) != std::string::npos;) text.replace(at, 6, "\"" + folder + "\"");
    return Value::parse(text);
  };
  const std::string cpu = R"("offload_optimizer": {"device": "cpu"})";
  const std::string nvme = R"("offload_optimizer": {"device": "nvme", "nvme_path": FOLDER})";
  return {
      Value::parse(R"({"zero_optimization": true})"),
      zero(R"("stage": 0)"),
      zero(R"("stage": 1)"),
      zero(R"("stage": 3)"),
      zero(R"("stage": 1)", R"("bf16": {"enabled": true})"),
      zero(R"("stage": 1)", R"("prescale_gradients": true, "sequence_parallel_size": 2)"),
      zero(R"("stage": 3, )" + cpu),
      zero(R"("stage": 3, )" + nvme),
      zero(R"("stage": 3, "offload_param": {"device": "cpu"})"),
      zero(R"("stage": 3, "offload_param": {"device": "nvme", "nvme_path": FOLDER})"),
      zero(R"("stage": 2, "zenflow": {}, )" + cpu),
      zero(R"("stage": 2, "zero_quantized_gradients": true, "zeropp_loco_param": {})"),
      zero(R"("stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true})"),
      zero(R"("stage": 2, "placement": {"auto": true}, "offload_optimizer": {"nvme_path": FOLDER})"),
  };
}

std::vector<Value> values_for(const Field& field, const std::string& folder) {
  std::vector<Value> out;
  for (const config::Literal& choice : field.choices) out.push_back(config::to_value(choice));
  if (field.kinds & config::kBool) out.insert(out.end(), {true, false});
  if (field.kinds & (config::kInt | config::kFloat)) out.insert(out.end(), {3, 0.25});
  if (field.kinds & config::kText && field.choices.empty()) out.push_back(folder);
  for (const config::Literal& item : field.item_choices) out.push_back(Value::array({config::to_value(item)}));
  return out;
}

class Changes {
 public:
  Changes() : situations_(situations(first_.path())) {
    for (const Value& root : situations_) usual_.push_back(options_with(root));
  }

  // Some value of the key makes other options in some situation.
  bool by(const Key& key) const {
    for (size_t i = 0; i < situations_.size(); ++i) {
      EXPECT_NE(usual_[i], "") << situations_[i].dump();
      for (const Value& value : values_for(*key.field, second_.path())) {
        const std::string now = options_with(at_path(situations_[i], key.path, value));
        if (!now.empty() && now != usual_[i]) return true;
      }
    }
    return false;
  }

 private:
  const io::Folder first_, second_;
  const std::vector<Value> situations_;
  std::vector<std::string> usual_;
};

TEST(OptionKeys, EachChangesTheOptionsOrSaysWhyNot) {
  std::vector<Key> keys;
  collect(config::schema(config::Root::kTraining).root.fields, "", "", keys);
  ASSERT_GT(keys.size(), 150u);
  const Changes changes;
  std::set<std::string> unknown = kReadInPython;
  int in_options = 0;
  for (const Key& key : keys) {
    unknown.erase(key.path);
    const bool marked = !key.field->no_effect_because.empty();
    if (kReadInPython.count(key.path)) {
      EXPECT_FALSE(marked) << key.path << " is marked no_effect(), and listed in keys_read_in_python.h: it is one";
      continue;
    }
    const bool acts = changes.by(key);
    in_options += acts;
    if (marked) {
      EXPECT_FALSE(acts) << key.path << " is marked no_effect(), but changes the engine's options: remove the mark";
    } else {
      EXPECT_TRUE(acts) << key.path << " changes no option of the engine. Let engine_options.cpp read it; where Python "
                        << "reads it, list it in keys_read_in_python.h; where nobody does, mark it no_effect(\"...\")";
    }
  }
  for (const std::string& path : unknown) ADD_FAILURE() << "keys_read_in_python.h: there is no key " << path;
  EXPECT_GT(in_options, 40);
}

TEST(OptionKeys, AMarkIsTold) {
  const std::string text = R"({"zero_optimization": {"round_robin_gradients": true}, "datastates_ckpt": {"mine": 1},
                               "vocabulary_size": null})";
  const config::Schema& schema = config::schema(config::Root::kTraining);
  const config::Config config = config::resolve(config::read_text(text, "test"), schema, {});
  std::vector<std::string> told;
  for (const config::Issue& issue : config.issues()) {
    if (issue.code == "no_effect") told.push_back(issue.paths.at(0) + ": " + issue.text);
  }
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(says(told[0],
                   "zero_optimization.round_robin_gradients = true (line 1) is accepted and has no effect here, "
                   "because every bucket"));
  EXPECT_EQ(told[1].find("datastates_ckpt.mine: "), 0u) << told[1];
  const std::string explained = config::explain(config, schema);
  EXPECT_TRUE(says(explained, "default; accepted, no effect here, because gradients always"));
  EXPECT_TRUE(says(explained, "line 1; accepted, no effect here, because every bucket belongs"));
  EXPECT_TRUE(says(explained, "line 1; accepted, no effect here, because snapshots are"));
  EXPECT_TRUE(says(config::docs(), "*Accepted, no effect here, because gradients always"));
  EXPECT_TRUE(says(config::json_schema(schema), "\"x-ds-no-effect\": \"because gradients always"));
}

}  // namespace
}  // namespace ds::zero
